"""The web page: two pages that show what the REST API says, with no other access to the control plane."""

from service.web.pages import mount

__all__ = ["mount"]
