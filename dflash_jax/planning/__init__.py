"""May it run, and in what shape: options and device memory decided before anything is loaded."""
