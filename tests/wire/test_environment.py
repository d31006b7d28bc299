"""Which variables a driver or a record may set in a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto import environment

CODE = [
    "PATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "DYLD_INSERT_LIBRARIES",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "BASH_ENV",
    "ENV",
    "IFS",
    "SHELLOPTS",
    "PS4",
    "PROMPT_COMMAND",
    "GLIBC_TUNABLES",
    "GCONV_PATH",
    "LOCPATH",
    "NODE_OPTIONS",
    "NODE_PATH",
    "PERL5LIB",
    "PERL5OPT",
    "PERLLIB",
    "RUBYOPT",
    "RUBYLIB",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
    "JDK_JAVA_OPTIONS",
    "MAVEN_OPTS",
    "CLASSPATH",
    "DOTNET_STARTUP_HOOKS",
    "LUA_INIT",
    "PHPRC",
    "R_PROFILE",
    "JULIA_LOAD_PATH",
    "MALLOC_PRELOAD",
    "SOMETHING_PRELOAD",
    "CUDA_INJECTION64_PATH",
    "NCCL_NET_PLUGIN",
    "GIT_SSH_COMMAND",
    "PAGER",
    "LESSOPEN",
    "EDITOR",
    "SSH_ASKPASS",
    "HOME",
    "SHELL",
    "http_proxy",
    "HTTPS_PROXY",
    "SSL_CERT_FILE",
    "OPENSSL_CONF",
    "GTK_MODULES",
    "QT_PLUGIN_PATH",
    "XDG_CONFIG_HOME",
    "XDG_CONFIG_DIRS",
    "NULLCMD",
    "READNULLCMD",
    "TMPPREFIX",
    "TERMPATH",
    "PATH_LOCALE",
    "AUTHSTATE",
    "KRB5_KTNAME",
    "USR_ACE",
    "VIMINIT",
    "IPYTHONDIR",
    "OMPI_MCA_mca_component_path",
    "VK_ICD_FILENAMES",
    "OCL_ICD_VENDORS",
    "FI_PROVIDER_PATH",
    "CUDA_HOME",
    "TRITON_CACHE_DIR",
    "GOFLAGS",
    "RUSTC_WRAPPER",
    "CARGO_HOME",
    "OUTFITTER_BUS",
    "OUTFITTER_KAFKA_CA_FILE",
    "OUTFITTER_INCARNATION",
]

DEVICES = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
    "NEURON_RT_VISIBLE_CORES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "NCCL_IB_HCA",
    "UCX_NET_DEVICES",
    "LM_LICENSE_FILE",
    "TMPDIR",
    "SERIAL_PORT",
    "V",
    "_x",
    "TOKEN",
]


@pytest.mark.parametrize("name", CODE)
def test_what_decides_which_code_a_process_runs_is_refused(name: str) -> None:
    assert environment.refusal(name, "x") is not None


@pytest.mark.parametrize("name", DEVICES)
def test_what_chooses_devices_is_not(name: str) -> None:
    assert environment.refusal(name, "0,1") is None


@pytest.mark.parametrize("name", ["", "A=B", "A\0B", "1A", "A B", "A-B", "BASH_FUNC_x%%", "É", "A\n", "\u0661A"])
def test_what_is_no_name_of_a_variable_is_refused(name: str) -> None:
    assert environment.refusal(name, "x") is not None


def test_a_value_that_no_process_can_be_given_is_refused() -> None:
    assert environment.refusal("V", "a\0b") == "its value has a NUL character"


@given(st.dictionaries(st.text(max_size=12) | st.sampled_from(CODE + DEVICES), st.text(max_size=5)))
def test_each_variable_is_kept_or_left_out_with_a_reason(variables: dict[str, str]) -> None:
    kept, left_out = environment.divide(variables)
    assert kept.keys() | left_out.keys() == variables.keys()
    assert not kept.keys() & left_out.keys()
    assert all(environment.refusal(name, value) is None for name, value in kept.items())
    assert all(left_out.values())
