"""What the operator reads at the start."""

from proxy.settings import load, summary
from tests.support.settings_files import UPSTREAM, problems, write_settings


def test_secrets_never_show(tmp_path):
    """Neither a repr, an error nor the start-up summary holds a configured secret."""
    text = (
        "server: {access_keys: [CANARY1], admin_key: CANARY2, port: CANARY}\n"
        "store: {key: CANARY3-0123456789, url: 'redis://:CANARY4@h/0?password=CANARY5'}\n"
        "upstreams: [{name: a, base_url: 'http://h', api_key: CANARY6, headers: {authorization: CANARY7}}]\n"
    )
    fine = text.replace(", port: CANARY}", "}")
    settings = load(write_settings(tmp_path, fine), {}, {})
    shown = repr(settings.server) + repr(settings.upstreams) + summary(settings, {})
    assert "CANARY" not in shown
    assert "CANARY" not in str(problems(tmp_path, text)[0])
    assert "CANARY" not in str(problems(tmp_path, fine.replace("CANARY6", '"CANARY 6"'))[0])


def test_the_summary_says_what_is_served(tmp_path):
    """Address, upstreams, windows, store, access and marks are all there, with what only the running proxy knows."""
    text = UPSTREAM + "models: [{name: 'q*', context_window: 8192, upstream: a}, {name: '*', unknown_window: 131072}]\n"
    settings = load(write_settings(tmp_path, text), {("server", "workers"): 2}, {})
    shown = summary(settings, {"store": "embedded, 3 keys", "window *": "32,768 tokens (said by the server)"})
    for part in (
        "http://127.0.0.1:8484/v1  (2 workers)",
        "a  http://127.0.0.1:1/v1  (the client's key, default)",
        "q*  window: 8,192 tokens  -> a",
        "*  window: 32,768 tokens (said by the server)",
        "embedded, 3 keys",
        "this machine only, no key",
        "on: above 90% of the room, down to 40%",
        "background, by the request's own model, with its own key; at most 10% of the tokens a client sends in an hour",
    ):
        assert part in shown


def test_the_summary_does_not_promise_a_window_it_does_not_know(tmp_path):
    """A rule without a window says where one will come from."""
    shown = summary(
        load(write_settings(tmp_path, UPSTREAM + "models: [{name: '*', unknown_window: 4096}]\n"), {}, {}), {}
    )
    assert "*  window: asked of the server, else by the model table, else 4,096 tokens" in shown
    shown = summary(load(write_settings(tmp_path, UPSTREAM), {}, {}), {})
    assert "*  window: asked of the server, else by the model table, else learned from the first overflow" in shown
