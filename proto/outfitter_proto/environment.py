"""The environment variables that a driver, and so a record, may set: those that select devices, but none that select
code.

Otherwise a user who may write to the ledger's topic or the embedded bus's file could run code as every worker's user:
by a preloaded library, a search path or options of an interpreter. The manager checks drivers' reports. Every program
that applies a record's variables checks the record.

The lists have the variables that glibc ignores in set-user-ID programs (ld.so(8), "secure-execution mode") and those
that sudo(8) removes by default. They also have those from which interpreters and common programs take code, modules,
options or commands, and the directories in which these look for their configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_EXACT = frozenset(
    {
        # search paths of programs and files, and the user
        "PATH", "HOME", "SHELL", "USER", "LOGNAME", "PWD", "OLDPWD", "CDPATH", "FPATH", "ZDOTDIR",
        # shells
        "BASH_ENV", "ENV", "IFS", "SHELLOPTS", "BASHOPTS", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "GLOBIGNORE",
        "INPUTRC", "HISTFILE", "NULLCMD", "READNULLCMD", "TMPPREFIX",
        # the C library
        "GLIBC_TUNABLES", "GCONV_PATH", "GETCONF_DIR", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH", "NIS_PATH", "NLSPATH",
        "RESOLV_HOST_CONF", "RES_OPTIONS", "TZDIR", "TERMINFO", "TERMINFO_DIRS", "TERMCAP",
        "TERMPATH", "PATH_LOCALE", "AUTHSTATE",
        # interpreters and runtimes
        "CLASSPATH", "NODE_OPTIONS", "NODE_PATH", "PHPRC", "PHP_INI_SCAN_DIR", "GUILE_LOAD_PATH", "GEM_HOME",
        "GEM_PATH", "ERL_FLAGS", "ERL_AFLAGS", "ERL_ZFLAGS", "ERL_LIBS", "COR_PROFILER", "COR_PROFILER_PATH",
        "COR_ENABLE_PROFILING", "MONO_PATH", "GHCRTS", "OCAMLRUNPARAM", "CAMLRUNPARAM", "BUNDLE_GEMFILE",
        "IPYTHONDIR", "GOFLAGS", "GOENV", "GOPATH", "GOROOT", "GOTOOLDIR", "GOTOOLCHAIN", "RUSTFLAGS", "EXINIT",
        "VIMINIT", "MYVIMRC", "VIMRUNTIME", "EMACSLOADPATH",
        # commands that programs run
        "EDITOR", "VISUAL", "PAGER", "MANPAGER", "BROWSER", "LESSOPEN", "LESSCLOSE", "LESSKEY", "SSH_ASKPASS",
        "SUDO_ASKPASS", "RSYNC_RSH", "CVS_RSH", "MAKEFLAGS", "MFLAGS", "GNUMAKEFLAGS", "CC", "CXX", "NVCC", "LD",
        # libraries and modules that libraries load
        "OMP_TOOL_LIBRARIES", "HSA_TOOLS_LIB", "ROCP_TOOL_LIB", "SSLKEYLOGFILE", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "KRB5_CONFIG", "KRB5_KTNAME", "KUBECONFIG", "FI_PROVIDER_PATH",
        "VK_ICD_FILENAMES", "VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES", "CUDA_PATH", "CUDA_CACHE_PATH", "ROCM_PATH",
    }
)  # fmt: skip
_PREFIXES = (
    "OUTFITTER_",
    "LD_", "DYLD_", "_RLD", "LDR_", "LIBPATH", "SHLIB_PATH", "MALLOC_",
    "BASH_FUNC_", "PYTHON", "PERL", "RUBY", "LUA_", "JULIA_", "R_",
    "JAVA_", "_JAVA_", "JDK_", "DOTNET_", "CORECLR_", "COMPLUS_",
    "GIT_", "OPENSSL_", "GTK_", "QT_", "GST_", "GIO_",
    # where programs look for configurations, components and code that they have compiled
    "XDG_", "JUPYTER_", "CARGO_", "RUSTC_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OCL_ICD_", "TRITON_",
    "TORCHINDUCTOR_",
)  # fmt: skip
_SUFFIXES = (
    "_PRELOAD", "_PROXY", "_OPTIONS", "_OPTS", "_PLUGIN", "_PLUGINS", "_PLUGIN_PATH", "_LIBRARY_PATH", "_LOAD_PATH",
    "_MODULE_PATH", "_MODULE_DIR", "_DRIVERS_PATH", "_LAYER_PATH", "_INJECTION_PATH", "_INJECTION32_PATH",
    "_INJECTION64_PATH", "_HOME", "_CONFIG", "_CONFIG_DIR", "_CACHE_DIR", "_COMMAND", "_WRAPPER", "_FLAGS", "_ACE",
)  # fmt: skip


def refusal(name: str, value: str = "") -> str | None:
    """Why no driver or record may set variable `name` to `value`; None if it may. Case is ignored, as in
    `http_proxy`."""
    if not _NAME.fullmatch(name):
        return "a name has letters, digits and _, and does not begin with a digit"
    if "\0" in value:
        return "its value has a NUL character"
    upper = name.upper()
    if upper.startswith("OUTFITTER_"):
        return "it is Outfitter's own"
    if upper in _EXACT or upper.startswith(_PREFIXES) or upper.endswith(_SUFFIXES):
        return "it can decide which code a process runs"
    return None


def divide(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Divide a record's variables into the allowed ones and, by name, the reasons against the others."""
    left_out = {name: why for name, value in variables.items() if (why := refusal(name, value)) is not None}
    return {name: value for name, value in variables.items() if name not in left_out}, left_out
