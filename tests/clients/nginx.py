"""nginx's settings for tests: what all have in common, around the rules of one."""

from __future__ import annotations

_FRAME = """
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a;
    proxy_temp_path {folder}/b;
    fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d;
    scgi_temp_path {folder}/e;
    UPSTREAM
    server {{
        listen 127.0.0.1:{port};
        RULES
    }}
}}
"""


def nginx_template(rules: str, upstream: str = "") -> str:
    """Return settings whose folder and port `str.format` puts in, as it does the braces of both arguments."""
    return _FRAME.replace("UPSTREAM", upstream).replace("RULES", rules)
