"""The version of this code, installed or not."""

VERSION = "0.1.0"
