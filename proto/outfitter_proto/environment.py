"""The environment variables that a record may set in a worker's process: those that select devices, and those that the
worker itself allows.

Otherwise a user who may write to the ledger's topic or the embedded bus's file could run code as every worker's user:
by a preloaded library, a search path, options of an interpreter, or a name that only one framework knows. So each
variable is one of three:

- known to select devices, by its name: it is set;
- known to decide about code: it is never set, also if the worker allows it, and no driver may report it;
- any other: the worker must allow it by `OUTFITTER_ALLOW_ENV`, which no record can set. If it does not, its program
  does not begin: without the variable it might see every device of the machine.

The manager checks drivers' reports for the second kind. Every program that applies a record's variables checks the
record.

The lists of the second kind have the variables that glibc ignores in set-user-ID programs (ld.so(8), "secure-execution
mode") and those that sudo(8) removes by default. They also have those from which interpreters and common programs take
code, modules, options or commands, and the directories in which these look for their configuration.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

ALLOWING = "OUTFITTER_ALLOW_ENV"
"""The worker's own variable with the names that it allows, separated by commas or blanks."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_SELECTING = re.compile(
    "|".join(
        (
            # of NVIDIA, AMD, Ascend, Gaudi, TPU, Trainium and others
            "[A-Z0-9_]+_VISIBLE_(?:DEVICES|MODULES|CHIPS|CORES)",
            "CUDA_DEVICE_ORDER", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_IMEX_CHANNELS",
            "GPU_DEVICE_ORDINAL",
            "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR",
            "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS",
            # network cards
            "UCX_NET_DEVICES", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NVSHMEM_HCA_LIST", "GLOO_SOCKET_IFNAME",
            "XRT_DEVICE(?:_BDF)?",
            # for programs of one's own, such as EXTERNAL_RESOURCE_NVME_PATH
            "EXTERNAL_RESOURCE_[A-Z0-9_]+",
        )
    )
)  # fmt: skip

_EXACT = frozenset(
    {
        # search paths of programs and files, and the user
        "TMPDIR", "TMP", "TEMP", "TEMPDIR",
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
        "NUMBA_CUDA_DRIVER", "PJRT_NAMES_AND_LIBRARY_PATHS", "TORCH_EXTENSIONS_DIR", "OPAL_PREFIX", "XILINX_XRT",
        "VDPAU_DRIVER_PATH", "ZE_ENABLE_ALT_DRIVERS", "XCL_EMULATION_MODE", "GCC_EXEC_PREFIX", "COMPILER_PATH",
        "CUDACXX", "HIP_COMPILER", "HIP_PLATFORM", "HIP_PATH", "HIP_CLANG_PATH", "MPLBACKEND", "MPLCONFIGDIR",
        "GNUPGHOME",
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
    "TORCHINDUCTOR_", "NUMBAPRO_", "__EGL_", "__GLX_", "ALSA_",
    # frameworks of workers, and tools that they call
    "FLINK_", "PYFLINK_", "SPARK_", "PYSPARK_", "HADOOP_", "CELERY_", "DJANGO_", "RAY_", "AIRFLOW_", "LOG4J_",
    "AWS_", "CLOUDSDK_", "PIP_", "UV_", "CONDA_", "NPM_CONFIG_", "DOCKER_",
)  # fmt: skip
_SUFFIXES = (
    "_PRELOAD", "_PROXY", "_OPTIONS", "_OPTS", "_PLUGIN", "_PLUGINS", "_PLUGIN_PATH", "_LIBRARY_PATH", "_LOAD_PATH",
    "_CONF_DIR", "_CONFIG_FILE", "_CONFIG_PATH", "_CONFIGURATION_FILE", "_INDEX_URL", "_DRIVER_PATH", "_INI_PATH",
    "_MODULE_PATH", "_MODULE_DIR", "_DRIVERS_PATH", "_LAYER_PATH", "_INJECTION_PATH", "_INJECTION32_PATH",
    "_INJECTION64_PATH", "_HOME", "_CONFIG", "_CONFIG_DIR", "_CACHE_DIR", "_COMMAND", "_WRAPPER", "_FLAGS", "_ACE",
)  # fmt: skip


def refusal(name: str, value: str = "") -> str | None:
    """Why no driver or record may set variable `name` to `value`, whatever the worker allows; None if it may. Case is
    ignored, as in `http_proxy`."""
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


def allowed_by(text: str) -> frozenset[str]:
    """The names in a value of `OUTFITTER_ALLOW_ENV`.

    Raises:
        ValueError: it has what no record may set.
    """
    names = frozenset(text.replace(",", " ").split())
    for name in sorted(names):
        if (why := refusal(name)) is not None:
            raise ValueError(f"{name[:80]!r} cannot be allowed to any record: {why}")
    return names


def unknown(variables: Iterable[str], allowed: Container[str]) -> list[str]:
    """Those of `variables`, which are not refused, that neither select devices, as far as we know, nor are allowed."""
    return sorted(name for name in variables if not _SELECTING.fullmatch(name) and name not in allowed)


def how_to_allow(names: Iterable[str], allowed: Iterable[str] = ()) -> str:
    """The exact settings of a worker that allow `names` besides what it has `allowed`."""
    every = sorted({*allowed, *names})
    options = " ".join(f"--allow-env {name}" for name in every)
    return f"set {ALLOWING}={','.join(every)} in its environment (`outfitter run` and `hold` also have {options})"


def divide(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Divide a record's variables into those that are not refused and, by name, the reasons against the others."""
    left_out = {name: why for name, value in variables.items() if (why := refusal(name, value)) is not None}
    return {name: value for name, value in variables.items() if name not in left_out}, left_out
