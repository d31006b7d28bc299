"""Which environment variables a driver may set, and so a record: those that choose devices, none that choose code.

Whoever may write to the ledger's topic, or to the embedded bus's file, could else run code as every worker's user: with
a library to preload, a path to look for programs in, options of an interpreter. Drivers' reports are held to this where
they come in, and records wherever their variables are applied.

The lists are those that glibc ignores in set-user-ID programs (ld.so(8), "secure-execution mode"), that sudo(8)
removes by default, and that interpreters and common programs take code, modules, options or commands from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_EXACT = frozenset(
    {
        # where programs and files are looked for, and as whom
        "PATH", "HOME", "SHELL", "USER", "LOGNAME", "PWD", "OLDPWD", "CDPATH", "FPATH", "ZDOTDIR",
        # shells
        "BASH_ENV", "ENV", "IFS", "SHELLOPTS", "BASHOPTS", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "GLOBIGNORE",
        "INPUTRC", "HISTFILE",
        # the C library
        "GLIBC_TUNABLES", "GCONV_PATH", "GETCONF_DIR", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH", "NIS_PATH", "NLSPATH",
        "RESOLV_HOST_CONF", "RES_OPTIONS", "TZDIR", "TERMINFO", "TERMINFO_DIRS", "TERMCAP",
        # interpreters and runtimes
        "CLASSPATH", "NODE_OPTIONS", "NODE_PATH", "PHPRC", "PHP_INI_SCAN_DIR", "GUILE_LOAD_PATH", "GEM_HOME",
        "GEM_PATH", "ERL_FLAGS", "ERL_AFLAGS", "ERL_ZFLAGS", "ERL_LIBS", "COR_PROFILER", "COR_PROFILER_PATH",
        "COR_ENABLE_PROFILING", "MONO_PATH", "GHCRTS", "OCAMLRUNPARAM", "CAMLRUNPARAM", "BUNDLE_GEMFILE",
        # commands that programs run
        "EDITOR", "VISUAL", "PAGER", "MANPAGER", "BROWSER", "LESSOPEN", "LESSCLOSE", "LESSKEY", "SSH_ASKPASS",
        "SUDO_ASKPASS", "RSYNC_RSH", "CVS_RSH", "MAKEFLAGS", "MFLAGS", "GNUMAKEFLAGS", "CC", "CXX", "NVCC", "LD",
        # libraries and modules that libraries load
        "OMP_TOOL_LIBRARIES", "HSA_TOOLS_LIB", "ROCP_TOOL_LIB", "SSLKEYLOGFILE", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "KRB5_CONFIG", "KUBECONFIG",
    }
)  # fmt: skip
_PREFIXES = (
    "OUTFITTER_",
    "LD_", "DYLD_", "_RLD", "LDR_", "LIBPATH", "SHLIB_PATH", "MALLOC_",
    "BASH_FUNC_", "PYTHON", "PERL", "RUBY", "LUA_", "JULIA_", "R_",
    "JAVA_", "_JAVA_", "JDK_", "DOTNET_", "CORECLR_", "COMPLUS_",
    "GIT_", "OPENSSL_", "GTK_", "QT_", "GST_", "GIO_",
)  # fmt: skip
_SUFFIXES = (
    "_PRELOAD", "_PROXY", "_OPTIONS", "_OPTS", "_PLUGIN", "_PLUGINS", "_PLUGIN_PATH", "_LIBRARY_PATH", "_LOAD_PATH",
    "_MODULE_PATH", "_MODULE_DIR", "_DRIVERS_PATH", "_LAYER_PATH", "_INJECTION_PATH", "_INJECTION32_PATH",
    "_INJECTION64_PATH",
)  # fmt: skip


def refusal(name: str, value: str = "") -> str | None:
    """Why no driver and no record may set variable `name` to `value`, or None where one may.

    Capitals make no difference: `http_proxy` counts as `HTTP_PROXY` does.
    """
    if not _NAME.fullmatch(name):
        return "a name has letters, digits and _, and begins with no digit"
    if "\0" in value:
        return "its value has a NUL character"
    known = name.upper()
    if known.startswith("OUTFITTER_"):
        return "it is Outfitter's own"
    if known in _EXACT or known.startswith(_PREFIXES) or known.endswith(_SUFFIXES):
        return "it can decide which code a process runs"
    return None


def divide(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Of the variables of a record those that may be set, and why the others are left out, by name."""
    left_out = {name: why for name, value in variables.items() if (why := refusal(name, value)) is not None}
    return {name: value for name, value in variables.items() if name not in left_out}, left_out
