"""The allow-list: what is handed on, what is a secret, what stays."""

from launch.environment import handed_on, secrets, trimmed

GIVEN = {
    "OMP_NUM_THREADS": "2",
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "a b'$`\n",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "MLFLOW_TRACKING_URI": "http://tracking:5000",
    "HF_HOME": "/data",
    "NORMSCALE_DEBUG": "1",
}
SECRET = {
    "MLFLOW_TRACKING_PASSWORD": "hush",
    "MLFLOW_TRACKING_USERNAME": "me",
    "MLFLOW_TRACKING_TOKEN": "t",
    "NORMSCALE_API_KEY": "k",
}
STAYS = {
    "PATH": "/bin",
    "HOME": "/root",
    "AWS_SECRET_ACCESS_KEY": "x",
    "HF_TOKEN": "x",
    "LD_PRELOAD": "x",
    "RANK": "1",
    "PYTHONPATH": "x",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "NORMSCALE_DEVICE": "cuda",
    "NORMSCALE_STATUS_DIR": "/tmp",
    "NORMSCALE_PLAN": "{}",
    "NORMSCALE_MAKE_ARGS": "a=1",
}


def test_each_variable_goes_where_it_may():
    everything = {**GIVEN, **SECRET, **STAYS}
    assert handed_on(everything) == GIVEN
    assert secrets(everything) == SECRET


def test_an_address_with_a_password_in_it_is_a_secret():
    given = {"MLFLOW_TRACKING_URI": "https://me:hush@tracking/"}
    assert handed_on(given) == {}
    assert secrets(given) == given
    assert handed_on({"MLFLOW_TRACKING_URI": "http://h/@x"}) == {"MLFLOW_TRACKING_URI": "http://h/@x"}


def test_a_tool_gets_no_secret():
    assert trimmed({**GIVEN, **SECRET, **STAYS}) == {"PATH": "/bin", "HOME": "/root"}
