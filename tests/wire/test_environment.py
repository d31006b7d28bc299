"""Which variables a driver or a record may set in a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.gpu.nvidia import cuda_environment
from outfitter_proto import environment
from outfitter_service.cli._lib.running.no_devices import NONE_VISIBLE

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
    "TMPDIR",
    "TMP",
    # Flink's, Spark's, Celery's and the GPU libraries' own
    "NUMBA_CUDA_DRIVER",
    "NUMBAPRO_CUDALIB",
    "NUMBAPRO_NVVM",
    "TORCH_EXTENSIONS_DIR",
    "PJRT_NAMES_AND_LIBRARY_PATHS",
    "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON",
    "FLINK_CONF_DIR",
    "SPARK_CONF_DIR",
    "HADOOP_CONF_DIR",
    "CELERY_CONFIG_MODULE",
    "CELERY_LOADER",
    "DJANGO_SETTINGS_MODULE",
    "MPLBACKEND",
    "MPLCONFIGDIR",
    "AWS_CONFIG_FILE",
    "CLOUDSDK_PYTHON",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "CUDACXX",
    "OPAL_PREFIX",
    "__EGL_VENDOR_LIBRARY_FILENAMES",
    "VDPAU_DRIVER_PATH",
    "ALSA_CONFIG_PATH",
    "PIP_INDEX_URL",
    "UV_INDEX_URL",
    "LOG4J_CONFIGURATION_FILE",
    "RAY_ADDRESS",
    "GNUPGHOME",
    "ZE_ENABLE_ALT_DRIVERS",
    "XILINX_XRT",
    "HIP_PATH",
    "OUTFITTER_ALLOW_ENV",
    "OUTFITTER_BUS",
    "OUTFITTER_KAFKA_CA_FILE",
    "OUTFITTER_INCARNATION",
]

DEVICES = [
    "NVIDIA_DRIVER_CAPABILITIES",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_VISIBLE_DEVICES",
    "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "ONEAPI_DEVICE_SELECTOR",
    "EXTERNAL_RESOURCE_NVME_PATH",
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
    "NCCL_IB_HCA",
    "UCX_NET_DEVICES",
]

OTHERS = [
    "CUDA_MPS_PIPE_DIRECTORY",
    "LM_LICENSE_FILE",
    "LICENCE_FILE",
    "SERIAL_PORT",
    "V",
    "_x",
    "TOKEN",
    "cuda_visible_devices",
    "MY_CUDA_VISIBLE_DEVICES2",
    "_VISIBLE_DEVICES",
    "NVIDIA_ANYTHING",
    "HIP_ANYTHING",
    "EXTERNAL_RESOURCE",
]


@pytest.mark.parametrize("name", CODE)
def test_what_decides_which_code_a_process_runs_is_refused(name: str) -> None:
    assert environment.refusal(name, "x") is not None


@pytest.mark.parametrize("name", DEVICES)
def test_what_chooses_devices_is_set(name: str) -> None:
    assert environment.refusal(name, "0,1") is None
    assert environment.unknown([name], ()) == []


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_variable_is_set_only_where_the_worker_allows_it(name: str) -> None:
    assert environment.refusal(name, "0,1") is None
    assert environment.unknown([name], ()) == [name]
    assert environment.unknown([name], environment.allowed_by(f"A, {name}")) == []


@pytest.mark.parametrize("name", [*CODE, "A=B", "É"])
def test_no_worker_can_allow_what_decides_about_code(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be allowed to any record"):
        environment.allowed_by(f"FINE,{name}")


def test_what_shipped_drivers_and_run_itself_set_needs_no_permission() -> None:
    assert environment.unknown({**cuda_environment("0"), **NONE_VISIBLE}, ()) == []


def test_a_list_of_allowed_names_has_commas_or_blanks() -> None:
    assert environment.allowed_by("") == environment.allowed_by(" , ") == frozenset()
    assert environment.allowed_by("A,B C\n, D") == {"A", "B", "C", "D"}


@pytest.mark.parametrize("name", ["", "A=B", "A\0B", "1A", "A B", "A-B", "BASH_FUNC_x%%", "É", "A\n", "\u0661A"])
def test_what_is_no_name_of_a_variable_is_refused(name: str) -> None:
    assert environment.refusal(name, "x") is not None


def test_a_value_that_no_process_can_be_given_is_refused() -> None:
    assert environment.refusal("V", "a\0b") == "its value has a NUL character"


@given(st.dictionaries(st.text(max_size=12) | st.sampled_from(CODE + DEVICES + OTHERS), st.text(max_size=5)))
def test_each_variable_is_kept_or_left_out_with_a_reason(variables: dict[str, str]) -> None:
    kept, left_out = environment.divide(variables)
    assert kept.keys() | left_out.keys() == variables.keys()
    assert not kept.keys() & left_out.keys()
    assert all(environment.refusal(name, value) is None for name, value in kept.items())
    assert all(left_out.values())
