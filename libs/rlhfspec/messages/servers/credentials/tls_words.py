"""Why TLS failed, in words for a person; OpenSSL's come with its own file names.

Example:
    >>> tls_problem(ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required"))
    "the server refuses this client's certificate: tlsv13 alert certificate required"
    >>> said_of(ssl.SSLError(9, "[SSL] PEM lib (_ssl.c:3926)"))
    'PEM lib'
"""

from __future__ import annotations

import re
import ssl

UNKNOWN_AUTHORITY = {18, 19, 20, 21}  # of X509_V_ERR: its signer is not among those that are trusted


def tls_problem(error: ssl.SSLError) -> str:
    """Of the client of a server. An alert is what the other side has to say."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not to be trusted: {error.verify_message}"
    said = said_of(error)
    return f"the server refuses this client's certificate: {said}" if is_alert(error) else f"TLS fails: {said}"


def is_alert(error: ssl.SSLError) -> bool:
    return " alert " in str(error.args[-1])


def said_of(error: ssl.SSLError) -> str:
    return re.sub(r"^\[.*?\] | \(_ssl\.c:\d+\)$", "", str(error.args[-1]))


def is_of_unknown_authority(error: BaseException | None) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in UNKNOWN_AUTHORITY
