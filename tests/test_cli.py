"""The `jpaged` command, on a stand-in for the engine (`tests.fake_llm`)."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from shlex import split

import pytest

import jpaged
from jpaged.api.sampling_params import SamplingParams
from jpaged.cli import BENCHMARKS, main
from jpaged.host.interrupt import Interruptible, KeptInterrupt
from tests import fake_llm


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; returns (exit code, stdout, stderr, the LLM it made)."""
    module = type(sys)("jpaged.llm")
    module.LLM = fake_llm.LLM
    monkeypatch.setitem(sys.modules, "jpaged.llm", module)

    def run(*argv, stdin=None):
        fake_llm.created.clear()
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err, fake_llm.created[0] if fake_llm.created else None

    return run


def command(*argv, **options):
    """Starts the command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "tests.fake_llm", *argv], **options)


class TestTheCommandItself:
    def test_version_and_help_are_quick_and_import_neither_jax_nor_transformers(self):
        code = (
            "import sys; from jpaged.cli import main; codes = [main(['--version']), main(['chat', '--help'])];"
            "sys.exit(str(codes) + str({'jax', 'transformers', 'torch', 'numpy'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr.strip() == "[0, 0]set()"
        assert done.stdout.startswith(f"jpaged {jpaged.__version__}\nusage: jpaged chat")

    def test_help_says_the_defaults_of_the_engine_and_of_the_servers_limits(self, run):
        _, out, _, _ = run("serve", "--help")
        text = " ".join(out.split())
        assert "tokens in a block of the KV cache (default: 16)" in text
        assert "fraction of the device's memory to use (default: 0.9)" in text
        assert "choices for a prompt (default: 64)" in text
        assert "seconds for a chat template to render (default: 2.0)" in text
        assert "None" not in text

    @pytest.mark.parametrize("argv", [[], ["generate"], ["chat"], ["bench"]])
    def test_help_shows_what_to_type(self, run, argv):
        code, out, _, _ = run(*argv, "--help")
        assert code == 0
        assert ("examples:" in out) or argv == ["bench"]

    @pytest.mark.parametrize(
        "argv",
        [
            [],
            ["fly"],
            ["generate", "x", "--top-q", "1"],
            ["generate", "x", "--top-k", "y"],
            ["serve", "--token-buckets", "y"],
        ],
    )
    def test_a_wrong_command_line_is_two(self, run, argv):
        code, out, err, llm = run(*argv)
        assert (code, out, llm) == (2, "", None)
        assert "usage: jpaged" in err

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--temperature", "-1"], "temperature must be at least 0"),
            (["--max-tokens", "0"], "max_tokens must be at least 1"),
            (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens=9 is above max_tokens=3"),
            (["--block-size", "24"], "block_size must be a power of two"),
            (["--gpu-memory-utilization", "2"], "gpu_memory_utilization must be in"),
            (["--decode-buckets", "8,4"], "decode_buckets must ascend"),
            (["--raw", "--system", "x"], "--system needs the chat template"),
            (["--file", "x"], "either PROMPT or --file"),
        ],
    )
    def test_a_value_out_of_range_is_said_before_anything_loads(self, run, options, said):
        code, out, err, llm = run("generate", "x", *options)
        assert (code, out, llm) == (2, "", None)
        assert err.startswith("jpaged: error: ")
        assert said in err
        assert err.count("\n") == 1

    def test_an_error_is_one_line_and_debug_shows_where(self, run):
        code, out, err, _ = run("generate", "x", "--model", "missing")
        assert (code, out, err) == (1, "", "jpaged: error: missing does not exist; give a directory.\n")
        for argv in (["--debug", "generate", "x"], ["generate", "x", "--debug"]):
            code, _, err, _ = run(*argv, "--model", "missing")
            assert code == 1
            assert "Traceback" in err

    def test_a_defect_is_called_one(self, run):
        code, _, err, _ = run("generate", "x", "--model", "defect")
        assert code == 1
        assert err.startswith("jpaged: error: ZeroDivisionError: division by zero (this is a defect")

    def test_an_engine_that_dies_is_reported(self, run):
        code, _, err, _ = run("generate", "die")
        assert (code, err) == (1, "jpaged: error: The engine failed: out of luck\n")

    def test_python_m_jpaged_is_the_same_command(self):
        done = subprocess.run([sys.executable, "-m", "jpaged", "--version"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"jpaged {jpaged.__version__}\n")

    def test_engine_options_reach_the_engine_and_no_others(self, run):
        _, _, _, llm = run("generate", "x")
        assert (llm.model, llm.options) == (None, {"verbose": False, "max_num_seqs": 1})
        options = split(
            "--dtype float32 --max-model-len 99 --block-size 32 --gpu-memory-utilization 0.5 --revision r"
            " --generation-config vllm"
            " --num-gpu-blocks-override 7 --max-num-seqs 3 --max-num-batched-tokens 64 --no-enable-prefix-caching"
            " --decode-buckets 1,3 --token-buckets 64"
            " --load-format dummy --tokenizer t --seed 5 --model m --swap-space 0.5 --preemption-mode swap"
        )
        _, _, _, llm = run("generate", "x", *options)
        assert llm.model == "m"
        assert llm.options == {
            "dtype": "float32", "max_model_len": 99, "block_size": 32, "gpu_memory_utilization": 0.5, "revision": "r",
            "num_gpu_blocks_override": 7, "max_num_seqs": 3, "max_num_batched_tokens": 64, "decode_buckets": (1, 3),
            "token_buckets": (64,),
            "enable_prefix_caching": False, "load_format": "dummy", "tokenizer": "t", "seed": 5, "verbose": False,
            "generation_config": "vllm",
            "swap_space": 0.5, "preemption_mode": "swap",
        }  # fmt: skip
        _, _, _, llm = run("generate", "x", "--host-prefix-cache", "--expert-load")
        assert llm.options == {"verbose": False, "max_num_seqs": 1, "host_prefix_cache": True, "expert_load": True}

    def test_sampling_options_replace_the_models_defaults(self, run):
        _, _, _, llm = run("generate", "x", "--seed", "5")
        params = llm.engine.seen[0][1]
        assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.6, 20, 512, 5)
        options = split(
            "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2"
            " --frequency-penalty 0.3 --max-tokens 7 --min-tokens 2 --ignore-eos --stop END --stop '\\n'"
        )
        _, _, _, llm = run("generate", "x", *options)
        params = llm.engine.seen[0][1]
        assert params == SamplingParams(
            temperature=0, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
            frequency_penalty=0.3, max_tokens=7, min_tokens=2, ignore_eos=True, stop=["END", "\n"], output_kind=1,
            seed=params.seed,
        )  # fmt: skip

    def test_without_a_seed_every_run_draws_another(self, run):
        seeds = {run("generate", "x")[3].engine.seen[0][1].seed for _ in range(3)}
        assert len(seeds) == 3


class TestBench:
    def test_passes_the_arguments_on_and_returns_the_code(self, run, monkeypatch):
        module = type(sys)("jpaged.bench.scheduler")
        module.main = lambda argv: 7 if argv == ["--help", "-x", "3"] else 0
        monkeypatch.setitem(sys.modules, "jpaged.bench.scheduler", module)
        assert run("bench", "scheduler", "--help", "-x", "3")[0] == 7
        assert run("bench", "scheduler")[0] == 0

    @pytest.mark.parametrize(
        ("argv", "says"), [(["luck"], "there is no benchmark 'luck'"), ([], "name a benchmark"), (["--help"], "usage")]
    )
    def test_lists_the_benchmarks_a_line_each_unless_one_is_named(self, run, argv, says):
        code, out, err, _ = run("bench", *argv)
        assert code == (0 if argv == ["--help"] else 2)
        assert says in (out + err).splitlines()[0]
        lines = [line.split(maxsplit=1) for line in (out + err).splitlines()]
        assert all([name, what] in lines for name, what in BENCHMARKS.items())
        assert "arguments" not in out + err


class TestGenerate:
    def test_answers_through_the_chat_template(self, run):
        code, out, err, llm = run("generate", "hello", "--system", "be kind")
        assert (code, err) == (0, "")
        assert llm.engine.seen[0][0] == "<system>be kind\n<user>hello\n"
        assert out == "You said: hello [28]\n"

    def test_raw_and_models_without_a_template_continue_the_text(self, run):
        for options in (["--raw"], ["--model", "base"]):
            _, out, _, llm = run("generate", "hello", *options)
            assert llm.engine.seen[0][0] == "hello"
            assert out == "You said: hello [5]\n"

    def test_a_system_message_without_a_template_is_refused(self, run):
        code, _, err, _ = run("generate", "hello", "--model", "base", "--system", "x")
        assert code == 2
        assert "base does not have" in err

    @pytest.mark.parametrize("argv", [[], ["-"]])
    def test_reads_the_prompt_from_a_pipe(self, run, argv):
        _, out, _, llm = run("generate", *argv, "--raw", stdin="two\nlines\n")
        assert llm.engine.seen[0][0] == "two\nlines"
        assert out == "You said: lines [9]\n"

    def test_an_empty_prompt_is_refused(self, run):
        for argv in (["generate", ""], ["generate", "", "--raw"], ["generate"]):
            code, out, err, _ = run(*argv, stdin="")
            assert (code, out) == (1, "")
            assert "The prompt is empty" in err

    def test_text_appears_as_it_is_generated(self):
        process = command("generate", "slow", stdout=subprocess.PIPE)
        first = os.read(process.stdout.fileno(), 100)
        assert process.poll() is None
        assert b"You said: slow ["[: len(first)] == first
        assert (first + process.stdout.read()).startswith(b"You said: slow [")
        assert process.wait() == 0

    def test_a_file_is_answered_in_its_order(self, run, tmp_path):
        file = tmp_path / "prompts.txt"
        file.write_text("a long first line\n\nb\r\nünï\n", encoding="utf-8")
        code, out, err, llm = run("generate", "--file", str(file))
        assert (code, err) == (0, "")
        assert out == "You said: a long first line [24]\n\nYou said: b [8]\n\nYou said: ünï [10]\n"
        assert llm.options["max_num_seqs"] == 3

    def test_json_lines_say_everything(self, run):
        code, out, _, llm = run(
            "generate", "--file", "-", "--json", "--max-tokens", "3", "--seed", "7", stdin="a\n\nb\n"
        )
        assert code == 0
        rows = [json.loads(line) for line in out.splitlines()]
        assert rows[1] == {
            "line": 3, "prompt": "b", "text": "You", "finish_reason": "length", "stop_reason": None,
            "num_prompt_tokens": 8, "num_output_tokens": 3,
        }  # fmt: skip
        assert [params.seed for _, params in llm.engine.seen] == [7, 8]
        _, out, _, _ = run("generate", "one", "--json")
        assert json.loads(out)["text"] == "You said: one [10]"

    def test_a_line_that_cannot_be_served_fails_alone(self, run):
        text = "good\n" + "x" * 60 + "\nfine\n"
        code, out, err, _ = run("generate", "--file", "-", "--max-model-len", "50", stdin=text)
        assert code == 1
        assert out == "You said: good [11]\n\n\nYou said: fine [11]\n"
        assert err == "jpaged: line 2: The prompt has 67 tokens; at most 49 fit.\n"
        code, out, err, _ = run("generate", "--file", "-", "--max-model-len", "50", "--json", stdin=text)
        assert (code, err) == (1, "")
        assert [list(json.loads(line))[2] for line in out.splitlines()] == ["text", "error", "text"]

    def test_a_missing_or_empty_file_is_named(self, run, tmp_path):
        code, _, err, llm = run("generate", "--file", str(tmp_path / "none.txt"))
        assert (code, llm) == (1, None)
        assert "none.txt" in err
        (tmp_path / "empty.txt").write_text("\n")
        code, _, err, llm = run("generate", "--file", str(tmp_path / "empty.txt"))
        assert (code, llm) == (1, None)
        assert "has no prompts" in err

    def test_ends_quietly_when_the_reader_goes_away(self):
        process = command("generate", "endless", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""

    @pytest.mark.parametrize("argv", [["endless"], ["--file", "-"]])
    def test_ctrl_c_ends_it_with_130_and_no_traceback(self, argv):
        process = command("generate", *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdin.write(b"quick\nendless\n")
        process.stdin.close()
        os.read(process.stdout.fileno(), 10)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in process.stderr.read()


class TestInterruptible:
    def test_the_first_ctrl_c_is_a_flag_and_the_second_raises(self):
        before = signal.getsignal(signal.SIGINT)
        with Interruptible() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before


class TestKeptInterrupt:
    """Of which `drop` is what a callback of C++ does to a KeyboardInterrupt."""

    def drop(self):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def test_a_ctrl_c_that_came_to_nothing_is_raised_at_the_next_check(self):
        done = []

        def work(interrupt):
            for i in range(5):
                interrupt.check()
                done.append(i)
                if i == 2:
                    self.drop()

        with pytest.raises(KeyboardInterrupt), KeptInterrupt() as interrupt:
            work(interrupt)
        assert done == [0, 1, 2]

    def test_it_is_raised_at_the_end_at_the_latest(self):
        with pytest.raises(KeyboardInterrupt), KeptInterrupt():
            self.drop()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_what_else_a_program_does_on_ctrl_c_is_left_alone(self):
        with Interruptible() as flag, KeptInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
        assert flag.requested


class TestChatFromAPipe:
    def test_remembers_the_conversation(self, run):
        code, out, err, llm = run("chat", "--system", "be kind", stdin="one\n\ntwo\n")
        assert (code, err) == (0, "")
        assert out == "You said: one [26]\nYou said: two [66]\n"
        assert llm.engine.seen[1][0] == "<system>be kind\n<user>one\n<assistant>You said: one [26]\n<user>two\n"

    def test_commands_are_obeyed_and_leave_the_output_alone(self, run):
        lines = "/retry\none\n/retry\n/reset\ntwo\n/system be brief\n/system\nthree\n/fly\n/help\n/quit\nnever\n"
        _, out, err, llm = run("chat", stdin=lines)
        assert [text for text, _ in llm.engine.seen] == [
            "<user>one\n", "<user>one\n", "<user>two\n", "<system>be brief\n<user>three\n",
        ]  # fmt: skip
        assert out.count("\n") == 4
        for said in ("nothing to answer", "forgotten", "be brief", "no command /fly", "Ctrl-C interrupts"):
            assert said in err

    def test_a_line_can_go_on_in_the_next(self, run):
        _, _, _, llm = run("chat", stdin="one\\\ntwo\nthree\\\n")
        assert [text.rpartition("<user>")[2] for text, _ in llm.engine.seen] == ["one\ntwo\n", "three\n"]

    def test_the_oldest_turns_make_room(self, run):
        _, out, _, llm = run("chat", "--max-model-len", "120", stdin="".join(f"message {i}\n" for i in range(9)))
        assert out.count("You said: message") == 9
        for text, _ in llm.engine.seen:
            assert len(text) + 30 <= 120
            assert text.startswith("<user>")
        assert "message 0" in llm.engine.seen[1][0]
        assert "message 0" not in llm.engine.seen[8][0]

    def test_a_message_that_never_fits_is_refused_and_the_talk_goes_on(self, run):
        code, out, err, _ = run("chat", "--max-model-len", "50", stdin="x" * 60 + "\nshort\n")
        assert (code, out) == (0, "You said: short [12]\n")
        assert err == "jpaged: The prompt has 67 tokens; at most 49 fit.\n"

    def test_a_model_without_a_template_is_refused(self, run):
        code, _, err, _ = run("chat", "--model", "base", stdin="")
        assert code == 1
        assert "base has no chat template; use `jpaged generate`" in err

    def test_seeds_follow_each_other(self, run):
        _, _, _, llm = run("chat", "--seed", "3", stdin="a\nb\n")
        assert [params.seed for _, params in llm.engine.seen] == [3, 4]


class Terminal:
    """The command behind a pseudo-terminal, as a person has it."""

    def __init__(self, *argv, report, **environment):
        pid, self.fd = pty.fork()
        if pid == 0:  # the child becomes the command
            os.environ.update({"TERM": "xterm", "FAKE_LLM_REPORT": str(report), **environment})
            os.execv(sys.executable, [sys.executable, "-m", "tests.fake_llm", *argv])
        self.pid = pid
        self.text = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, text, timeout_s=60):
        """Reads until `text` has come since the last call; returns what came up to its end."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{text!r} did not come; the terminal shows {self.text!r}")
            self.text += os.read(self.fd, 4096).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before + text

    def wait_until_it_reads_a_line(self):
        """Until readline waits for what is typed, key by key; before that a signal is seen with the next key only."""
        end = time.monotonic() + 60
        while termios.tcgetattr(self.fd)[3] & termios.ICANON or not self._sleeps():
            assert time.monotonic() < end
            time.sleep(0.01)

    def _sleeps(self):
        """Whether it waits for something: its main thread sleeps, ten times in a row."""
        for _ in range(10):
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                return False
            time.sleep(0.02)
        return True

    def exit_code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class TestChatAtATerminal:
    def test_ctrl_c_twice_at_the_prompt_leaves(self, tmp_path):
        terminal = Terminal("chat", report=tmp_path / "seen")
        terminal.wait_for("> ")
        terminal.wait_until_it_reads_a_line()
        terminal.type("\x03")
        terminal.wait_for("(Ctrl-C again, Ctrl-D or /quit leaves)")
        terminal.wait_for("> ")
        terminal.wait_until_it_reads_a_line()
        terminal.type("\x03")
        assert terminal.exit_code() == 130

    def test_a_whole_conversation(self, tmp_path):
        terminal = Terminal("chat", report=tmp_path / "seen")
        assert "start-up table" in terminal.wait_for("> ")
        terminal.type("hello\r")
        terminal.wait_for("You said: hello [12]")
        terminal.wait_for("> ")
        terminal.type("endless\r")
        terminal.wait_for("endless endless")
        terminal.type("\x03")  # Ctrl-C ends the answer, not the program
        terminal.wait_for("(interrupted)")
        terminal.wait_for("> ")
        terminal.type("silent\r")
        terminal.wait_for("silent")
        terminal.wait_for(10 * " ")  # the beginning of the answer
        terminal.type("\x03")
        terminal.wait_for("(interrupted)")
        terminal.wait_for("> ")
        terminal.wait_until_it_reads_a_line()
        terminal.type("never sent\x03")  # and at the prompt it drops the line
        terminal.wait_for("(Ctrl-C again, Ctrl-D or /quit leaves)")
        terminal.wait_for("> ")
        terminal.type("\x1b[A\x1b[A\x1b[A\r")  # arrow up three times: the first message again
        terminal.wait_for("You said: hello [")
        terminal.wait_for("> ")
        terminal.type("/reset\r")
        terminal.wait_for("(conversation forgotten)")
        terminal.wait_for("> ")
        terminal.type("escape\r")
        shown = terminal.wait_for("wiped")
        assert "\x1b[2J" not in shown  # the model cannot clear the screen
        terminal.wait_for("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.exit_code() == 0
        seen = json.loads((tmp_path / "seen").read_text())
        assert seen[0] == "<user>hello\n"
        assert seen[3].startswith("<user>hello\n<assistant>You said: hello [12]\n<user>endless\n<assistant>endless end")
        assert "silent" not in seen[3]  # a message that got no answer is taken back
        assert seen[3].endswith("<user>hello\n")
        assert seen[4] == "<user>escape\n"

    def test_colours_can_be_turned_off(self, tmp_path):
        terminal = Terminal("chat", "--quiet", report=tmp_path / "seen", NO_COLOR="1")
        shown = terminal.wait_for("> ")
        terminal.type("hello\r")
        shown += terminal.wait_for("[12]")
        terminal.type("/quit\r")
        assert terminal.exit_code() == 0
        assert "\x1b[1" not in shown
        assert "start-up table" not in shown

    def test_generate_without_a_prompt_says_what_to_do(self, tmp_path):
        terminal = Terminal("generate", report=tmp_path / "seen")
        terminal.wait_for("No prompt: write `jpaged generate")
        assert terminal.exit_code() == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
@pytest.mark.parametrize("command", ["generate", "generate hello --max-tokens 3", "chat"])
def test_a_closed_standard_stream_is_no_defect(command, closed):
    run = subprocess.run(
        f"{sys.executable} -m tests.fake_llm {command} {closed}", shell=True, capture_output=True, text=True, timeout=60
    )
    assert "defect" not in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
