"""The chat page at `/`: one static file, and the policy under which a browser runs it.

The page loads nothing: its one script and one style stand in it, and the policy allows exactly
those two by their hashes, and requests to the server that it came from.
"""

import base64
import hashlib
import importlib.resources
import re

_FOLDER = importlib.resources.files("dflash_jax.serving") / "static"


def chat_page() -> str:
    """The page."""
    return (_FOLDER / "chat.html").read_text(encoding="utf-8")


def content_security_policy(page: str) -> str:
    """What a browser may do with the page; a script that gets into it does not run."""
    scripts, styles = (_hashes(page, tag) for tag in ("script", "style"))
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            f"style-src {styles}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(page: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
