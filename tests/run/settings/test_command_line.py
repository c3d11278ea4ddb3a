"""The command line: wrong input gets one line that names the flag or file and the way out, and help is complete."""

import dataclasses
import functools
import inspect
import itertools
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence

import pytest
import torch
import yaml
from helpers import OF_CLIPS, REPO, SMALL, WAN, command, copy_of, rewrite, shell

from unified_trainer.__main__ import COMMANDS, command_named, main
from unified_trainer.basics.errors import UserError
from unified_trainer.basics.ranges import Range, above, at_least
from unified_trainer.basics.suggestions import GONE as REMOVED
from unified_trainer.basics.suggestions import RANKS, USUAL, nearest
from unified_trainer.rewards.base import ScorerConfig
from unified_trainer.roles.role import TrainableConfig
from unified_trainer.run.registry import METHODS, method_named
from unified_trainer.run.settings import command_line
from unified_trainer.run.settings import config as settings
from unified_trainer.run.settings.command_line import before_flags, parse
from unified_trainer.run.settings.config import RunConfig, flat, plain, run_class
from unified_trainer.run.settings.flags import apply
from unified_trainer.run.settings.settings import Setting, settings_of
from unified_trainer.tools import help_pages, overview

pytestmark = pytest.mark.slow

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


@functools.cache
def settings_of_method(name: str) -> dict[str, Setting]:
    """Every setting of a method's runs, with those of one more scorer."""
    run = run_class(method_named(name))()
    scorers = {"NAME": ScorerConfig(settings={"KEY": ""})}
    run = dataclasses.replace(run, reward=dataclasses.replace(run.reward, scorers=scorers))
    return {setting.key: setting for setting in settings_of(run)}


@functools.cache
def run_of(method: str) -> RunConfig:
    """The run of a method without flags."""
    return before_flags(["--method", method])


def refused(*words: str, parse: Callable[[Sequence[str]], object] = parse) -> str:
    """Return why a command line is refused."""
    with pytest.raises(UserError) as error:
        parse(words)
    assert "\n" not in str(error.value)
    return str(error.value)


def refused_flags(method: str, *words: str) -> str:
    """Return why a method's flags are refused; quicker than a whole command line."""
    return refused(*words, parse=functools.partial(apply, run_of(method)))


# Names.


UNKNOWN = [
    ("dance_grpo", "--student.learning-rat", "--student.learning-rate"),
    ("dance_grpo", "--learnin-rate", "--student.learning-rate"),
    ("dmd2", "--lr", "--student.learning-rate or --critic.learning-rate"),
    ("dmd2", "--critic.lr", "--critic.learning-rate"),
    ("dmd2", "--bs", "--algorithm.batch-size"),
    ("dance_grpo", "--bs", "--algorithm.num-prompts"),
    ("finetune", "--gradient-accumulation-steps", "--algorithm.micro-batch"),
    ("finetune", "--student.wd", "--student.weight-decay"),
    ("finetune", "--cfg", "--sampler.guidance-scale"),
    ("dmd2", "--guidance", "--sampler.guidance-scale or --algorithm.guidance-scale"),
    ("finetune", "--num_inference_steps", "--sampler.num-steps"),
    ("finetune", "--total-epochs", "--epochs"),
    ("finetune", "--val-only", "--validate-only"),
    ("finetune", "--save-freq", "--checkpoint-every"),
    ("finetune", "--max-train-steps", "--steps"),
    ("finetune", "--output_dir", "--output"),
    ("finetune", "--resume_from_checkpoint", "--resume"),
    ("finetune", "--lora-rank", "--student.adapter.rank"),
    ("finetune", "--frames", "--video.frames or --reward.frames or --validation.frames"),
    ("finetune", "--no-validation.ema", "--validation.no-ema"),
]


def test_an_unknown_flag_comes_with_those_it_may_mean(subtests):
    for method, wrong, right in UNKNOWN:
        with subtests.test(wrong):
            assert refused_flags(method, wrong, "1") == f"{wrong} is not known; did you mean {right}?"


def test_what_other_trainers_call_a_setting_leads_to_one():
    lost = []
    for name, meant in USUAL.items():
        keys = [key for method in METHODS for key in nearest(name, settings_of_method(method))]
        lost += [name] * (not any(f".{key}".endswith(tuple(f".{end}" for end in meant)) for key in keys))
    assert lost == []


GONE = [
    ("--student.activation-checkpointing", "is gone: --ROLE.activation-memory none, selective, full or a number of bl"),
    ("--live", "is gone: --tracking.tensorboard shows curves"),
    ("--parallel.offload", "is gone: --parallel.offload-weights and --parallel.offload-optimizer"),
    ("--algorithm.credit.discount", "is gone: rewards are of whole samples"),
]


def test_a_removed_flag_says_what_took_its_place():
    for wrong, instead in GONE:
        assert refused_flags("dance_grpo", wrong, "1").startswith(f"{wrong} {instead}")
    existing = {key for method in METHODS for key in settings_of_method(method)}
    assert {key for key in REMOVED if key in existing} == set()
    named = {word.strip(",").removeprefix("--") for words in REMOVED.values() for word in words.split() if "--" in word}
    keys = {name.replace("-", "_").replace("ROLE", "student").replace("NAME", "kind") for name in named}
    assert keys <= existing


def test_weights_to_start_with_need_a_method():
    for words in (["--init-from", "runs/x"], ["--student.path=model"], ["--student.path", "m", "--recipe", "tiny"]):
        flag = words[0].partition("=")[0]
        assert refused(*words).startswith(f"{flag} needs --method NAME, the method that trains these weights: awm, ")


def test_another_method_is_pointed_to_init_from(tmp_path):
    settings.save(run_of("dmd2"), tmp_path / "config.yaml")
    assert refused("--resume", str(tmp_path), "--method", "dance_grpo").endswith(
        "is a run of dmd2, not of dance_grpo: leave --method out, or begin a run of dance_grpo with its weights: "
        f"--method dance_grpo --init-from {tmp_path}"
    )
    assert refused("--config", str(tmp_path / "config.yaml"), "--method", "awm").endswith("leave --method out")


def test_the_number_of_ranks_is_set_by_torchrun():
    said = {name: refused_flags("finetune", f"--{name}", "8") for name in RANKS}
    launcher = "torchrun --shutdown-timeout 900 --nproc-per-node N -m unified_trainer"
    assert {name: text for name, text in said.items() if launcher not in text} == {}


def test_a_flag_of_another_method_names_it():
    message = "--algorithm.eta is a setting of dance_grpo, dance_ppo, distill_rl, not of finetune"
    assert refused("--method", "finetune", "--algorithm.eta", "0.3") == message


def test_a_name_like_no_other_is_pointed_to_the_help():
    assert refused("--xyzzy", "1") == "--xyzzy is not known; --help-all lists all there are"


def test_other_dashes_are_named(subtests):
    for word in ("-steps", "\u2013steps", "\u2014steps", "\u2014\u2014steps", "\u2212steps=3"):
        with subtests.test(word):
            right = f"--{word[word.index('steps') :]}"
            assert refused_flags("finetune", word, "3") == f"{word} must begin with two hyphens: write {right}"


def test_underscores_and_equals_signs_are_allowed():
    run = parse(["--method=dmd2", "--student.learning_rate=0.5", "--critic.adapter.rank", "3", "--validation.no_ema"])
    assert (run.method, run.student.learning_rate, run.critic.adapter.rank) == ("dmd2", 0.5, 3)
    assert not run.validation.ema


def test_an_unknown_method_or_recipe_comes_with_the_nearest(subtests):
    for flag, near in (("--method=dance_gpro", "dance_grpo"), ("--recipe=tinny", "tiny"), ("--method=DMD", "dmd2")):
        with subtests.test(flag):
            name, _, value = flag.partition("=")
            assert refused(flag).startswith(f"{name} {value!r} is not known; did you mean {near}? Have: ")


# Values.


VALUES = [
    ("--steps many", "--steps must be a whole number, not 'many'"),
    ("--steps 1 2", "--steps must be a whole number, not '1 2'"),
    ("--steps", "--steps needs a value: a whole number"),
    ("--steps --seed 1", "--steps needs a value: a whole number"),
    ("--steps=", "--steps must be a whole number, not ''"),
    ("--seed 0.5", "--seed must be a whole number, not '0.5'"),
    ("--device tpu", "--device must be one of auto, cuda, npu, cpu, not 'tpu'"),
    ("--student.betas 0.9", "--student.betas must be 2 values separated by spaces, each a number, not '0.9'"),
    ("--sampler.shift 1 --algorithm.kernel x", "--algorithm.kernel must be one of ode, dance, flow, flow_wan, cps"),
    ("--allow a b", "--allow must be a text, not 'a b'"),
    ("--student 5", "--student is a group of settings: name one of them, such as --student.path"),
    ("-- --steps 3", "-- stands alone: write a flag, such as --steps"),
    ("./runs/a --steps 3", "'./runs/a' belongs to no flag"),
    ("--async-save True", "--async-save takes no value, not 'True': write --async-save or --no-async-save"),
    ("--async-save=false", "--async-save takes no value, not 'false': write --async-save or --no-async-save"),
    (
        "--validation.ema False",
        "--validation.ema takes no value, not 'False': write --validation.ema or",
    ),
]


def test_a_value_that_cannot_be_is_named_with_what_can(subtests):
    for words, message in VALUES:
        with subtests.test(words):
            assert refused_flags("dance_grpo", *words.split()).startswith(message)


def test_nan_a_method_without_a_name_and_a_group_are_refused():
    assert refused("--reward.scorers.look", "5").startswith("--reward.scorers.look is a group of settings: ")
    assert refused("--student.learning-rate", "nan") == "student.learning_rate must be from 0 to 1, not nan"
    assert refused("--steps", "3", "--method") == "--method needs a value"


def test_a_value_may_begin_with_a_hyphen():
    flag = "--sampler.negative-prompt"
    said = refused_flags("finetune", flag, "-dark")
    assert said == f"{flag}: a value that begins with a hyphen is written {flag}=-dark"
    run = parse([f"{flag}=--dark", "--seed", "-3"])
    assert (run.sampler.negative_prompt, run.seed) == ("--dark", -3)


def test_the_last_of_two_flags_holds():
    run = apply(run_of("finetune"), ["--steps", "3", "--validation.ema", "--steps", "4", "--validation.no-ema"])
    assert (run.steps, run.validation.ema) == (4, False)


# Files.


IN_A_FILE = [
    ("student: {learning_rat: 0.1}", "student.learning_rat is not known; did you mean student.learning_rate?"),
    ("student: {learning_rate: fast}", "student.learning_rate must be a number, not 'fast'"),
    ("student: {learning_rate: }", "student.learning_rate must be a number, not empty"),
    ("student: {path: }", "student.path must be a text, not empty"),
    ("student: 5", "student is a group of settings: name one of them, such as student.path"),
    ("steps: {a: 5}", "steps.a is not known; "),
    ("steps: [5, 6]", "steps must be a whole number, not '5 6'"),
    ("ray: {ranks: true}", "ray.ranks must be a whole number, not 'True'"),  # the default is 1
    ("async_save: 1", "async_save must be true or false, not 1"),
    ("async_save: 'true'", "async_save must be true or false, not 'true'"),
    ("algorithm: {batch_size: 3}", "algorithm.batch_size is a setting of "),
    ("method: 3", "--method '3' is not known"),
]


def test_an_error_in_a_file_names_file_and_key(tmp_path, subtests):
    file = tmp_path / "mine.yaml"
    for text, message in IN_A_FILE:
        with subtests.test(text):
            file.write_text(text)
            said = refused("--config", str(file))
            assert said.startswith(message if message.startswith("--") else f"{file}: {message}")


def test_an_error_in_a_recipe_names_recipe_and_key(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("common: {video: {frame: 5}}")
    monkeypatch.setattr(settings, "RECIPES", tmp_path)
    said = refused("--recipe", "mine")
    assert said == "recipe mine: video.frame is not known; did you mean video.frames?"


def test_keys_of_a_file_may_have_hyphens_and_hold_scorers(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("student: {learning-rate: 1e-3}\nreward: {scorers: {motion-energy: {weight: 0.5}}}\n")
    run = parse(["--config", str(file), "--reward.scorers.look.kind", "saturation"])
    assert run.student.learning_rate == 1e-3
    assert run.reward.scorers == {"motion_energy": ScorerConfig(weight=0.5), "look": ScorerConfig(kind="saturation")}


def test_a_folder_is_no_config(tmp_path):
    assert refused("--config", str(tmp_path)).endswith(f"it is a folder; give a file, such as {tmp_path}/config.yaml")


@pytest.mark.parametrize("method", METHODS)
def test_every_switch_has_two_flags_and_is_saved(method, tmp_path):
    """All switches are turned to what they are not by default, and back from the saved file."""
    switches = [one for one in settings_of_method(method).values() if one.switch]
    run = parse(["--method", method, *(one.off if one.default else one.flag for one in switches)])
    values = flat(plain(run))
    assert {one.key: values[one.key] for one in switches} == {one.key: not one.default for one in switches}
    settings.save(run, tmp_path / "config.yaml")
    file = tmp_path / "config.yaml"
    assert parse(["--config", str(file)]) == dataclasses.replace(run, config=file)
    back = [one.flag if one.default else one.off for one in switches]
    again = flat(plain(parse(["--config", str(file), *back])))
    assert {one.key: again[one.key] for one in switches} == {one.key: one.default for one in switches}


# Commands.


WORDS = [
    ("train --steps 3", "command 'train' is not known. Have: "),
    ("exprot a b", "command 'exprot' is not known; did you mean export? Have: "),
    ("dance_grpo --steps 3", "dance_grpo is a method, not a command; did you mean --method dance_grpo?"),
    ("export", "RUN, OUT must be given; --help says how"),
    ("export a", "OUT must be given; --help says how"),
    ("export a b c", "'c' is one word too many: without a flag there is only RUN OUT"),
    ("export a b --dtype fp64", "--dtype must be one of fp32, bf16, not 'fp64'"),
    ("export a b --dtpye fp32", "--dtpye is not known; did you mean --dtype?"),
    ("export --run a", "--run is no flag: RUN is given without one"),
    ("export a --output b", "--output is not known; did you mean OUT?"),
    ("sample a --prompts x", "--output must be given; --help says how"),
    ("sample a --output x --stream True", "--stream takes no value, not 'True': write --stream or --no-stream"),
    ("rollout a --prompts x --output o --batch x", "--batch must be a whole number, not 'x'"),
    ("import-hpsv3 --base x", "--out must be given; --help says how"),
]


def test_a_wrong_word_of_a_command_is_named(capsys, subtests):
    for words, message in WORDS:
        with subtests.test(words):
            assert main(words.split()) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"error: {message}")


def test_a_command_takes_its_places_and_flags_in_any_order():
    bound = apply(command_named("sample"), ["--stream", "runs/a", "--output", "videos", "--prompts", "a", "b"])
    given = inspect.signature(command_named("sample")).bind(*bound.args, **bound.keywords).arguments
    assert (given["run"], given["prompts"], given["stream"]) == ("runs/a", ("a", "b"), True)


# Adapters.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--student.adapter.rank 2 --student.adapter.layers to_q nosuch",
            "has no linear layer nosuch; usual are to_q,",
        ),
        ("--student.adapter.layers to_q", "student.adapter.layers is for an adapter: set student.adapter.rank"),
    ],
)
def test_unknown_adapter_layers_are_refused_before_weights_are_read(run_folder, tmp_path, capsys, words, message):
    wan = copy_of(WAN, tmp_path / "wan")
    rewrite(wan / TRANSFORMER, lambda tensors: tensors["proj_out.bias"].fill_(torch.nan))  # another message when read
    path = ["--student.path", str(wan), "--output", str(run_folder)]
    assert main([*SMALL["finetune"], *path, *words.split()]) == 2
    assert message in capsys.readouterr().err and not run_folder.exists()


# Help.


WIDTHS = (80, 120)
ARGUMENTS = [(name, one) for name in COMMANDS for one in settings_of(command_named(name))]
EVERY_SETTING = {key: one for method in METHODS for key, one in settings_of_method(method).items()}


def test_every_setting_and_argument_is_explained_by_a_sentence():
    explained = [
        (one.key, help_pages.explanation(one)) for one in [*EVERY_SETTING.values(), *(x for _, x in ARGUMENTS)]
    ]
    assert [one for one in explained if not re.match(r"[A-Z0-9].*\.$", one[1], re.S)] == []


@pytest.mark.parametrize("method", METHODS)
def test_the_help_of_a_method_is_whole(method):
    """--help-all explains every setting that is read in full, and no line is longer than the terminal is wide."""
    read = [one for one in settings_of_method(method).values() if help_pages.reads(method_named(method), one.key)]
    for width in WIDTHS:
        page = help_pages.of_method(method_named(method), run_of(method), width, everything=True)
        said = " ".join(page.split())
        for setting in read:
            assert help_pages.explanation(setting) in said, setting.key
            assert f"{setting.flag} " in said or f"{setting.flag}, {setting.off} " in said
        assert max(map(len, page.splitlines())) <= width


def test_the_help_of_a_command_is_whole(subtests):
    for name, width in itertools.product(COMMANDS, WIDTHS):
        with subtests.test(name, width=width):
            page = help_pages.of_command(name, command_named(name), width)
            for argument in (one for of, one in ARGUMENTS if of == name):
                assert help_pages.explanation(argument) in " ".join(page.split())
                assert argument.shown in page
            assert max(map(len, page.splitlines())) <= width


@pytest.mark.parametrize("method", METHODS)
def test_help_names_the_settings_that_a_method_reads(method):
    for width in WIDTHS:
        page = help_pages.of_method(method_named(method), run_of(method), width, everything=False)
        sections = re.findall(r"^(\w+)(?:: .*)?$", page, re.M)
        assert ("hacking_monitor" in sections) == method_named(method).uses_reward
        reads_clips = (*OF_CLIPS, "dmd2", "self_forcing", "ode_init", "distill_rl")
        assert ("--data.path" in page) == (method in reads_clips) and "shuffle" in page
        assert ("  --prompts TEXT" in page) == (method not in OF_CLIPS)
        assert {"algorithm", "student", "reward", "validation"} <= set(sections)
        assert max(map(len, page.splitlines())) <= width
        named = {key for key in settings_of_method(method) if key.rpartition(".")[2].replace("_", "-") in page}
        assert {key for key in settings_of_method(method) if help_pages.reads(method_named(method), key)} <= named


def test_the_marks_of_common_settings_and_the_groups_exist():
    assert [key for key in help_pages.COMMON if key not in EVERY_SETTING] == []
    of_roles = {setting.key for setting in settings_of(TrainableConfig())}
    assert [key for key in help_pages.COMMON_OF_ROLES if key not in of_roles] == []
    sections = {key.partition(".")[0] for key in EVERY_SETTING if "." in key}
    assert sections == {
        *help_pages.GROUPS,
        *(role for method in METHODS for role in run_class(method_named(method))().roles),
    }


def test_the_overview_names_methods_commands_and_examples_that_parse(monkeypatch):
    page = overview.overview(COMMANDS, 80)
    for name in (*METHODS, *COMMANDS):
        assert re.search(rf"^  {name}  +[A-Z]", page, re.M)
    assert max(map(len, page.splitlines())) <= 80
    monkeypatch.setattr(command_line, "trained_sampler", lambda spec: None)
    for line in overview.EXAMPLES.replace("\\\n", "").splitlines():
        words = shlex.split(line)
        words = words[words.index("unified_trainer") + 1 :]
        if words[0] in COMMANDS:
            apply(command_named(words[0]), words[1:])
        elif "--resume" not in words:  # there is no such run here
            parse(words)


HELP = [
    ("", 2, "One trainer for"),
    ("--help", 0, "One trainer for"),
    ("-h", 0, "One trainer for"),
    ("--method dmd2 --help --steps many", 0, "python -m unified_trainer --method dmd2 --help\n\nDMD2: "),
    ("--help --method dmd2", 0, "python -m unified_trainer --method dmd2 --help\n"),
    ("--method finetune --help-all", 0, "python -m unified_trainer --method finetune --help-all\n"),
    ("export --help", 0, "python -m unified_trainer export RUN OUT [flags]\n\nWrite a role's weights"),
    ("sample runs/a --help", 0, "python -m unified_trainer sample RUN --prompts [TEXT ...] --output PATH"),
    ("--version", 0, "unified-trainer "),
]


def test_help_is_printed_wherever_it_is_asked_for(capsys, tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    for words, code, start in HELP:
        with subtests.test(words):
            assert main(words.split()) == code
            said = capsys.readouterr()
            assert said.out.startswith(start) and not said.err
            assert not list(tmp_path.iterdir())


def test_help_for_an_unknown_method_is_refused(capsys):
    assert main(["--method", "dance_gpro", "--help"]) == 2
    assert "did you mean dance_grpo?" in capsys.readouterr().err


def test_help_shows_the_values_of_the_recipe_and_the_saved_file(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method": "dmd2", "steps": 77}))
    assert main(["--config", str(tmp_path / "mine.yaml"), "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "or one update. Default: 77." in said
    assert "Network calls per sample. Default: 4." in said


LIMITS = [
    (None, "", ""),
    (at_least(0), "", ""),
    (at_least(1, 1000), "", ""),
    (above(0, 1000), "", ""),
    (at_least(-(10**18), 10**18), "", ""),
    (Range(), "", ""),
    (at_least(2, 10**6), "", "Must be at least 2."),
    (above(1), "", "Must be above 1."),
    (at_least(0, 60), "", "Must be from 0 to 60."),
    (above(0, 1), "", "Must be above 0 and at most 1."),
    (above(0, 1), "A number in (0, 1].", ""),
    (at_least(0, 1), "A number in (0, 1].", "Must be from 0 to 1."),
    (Range(never=(0,)), "", "Must be a finite number but not 0."),
    (Range(also=(math.inf,)), "", "Must be a finite number, or inf."),
]


def test_help_shows_ranges_that_surprise(monkeypatch, subtests):
    for limits, text, shown in LIMITS:
        with subtests.test(f"{limits} {text}"):
            monkeypatch.setattr(help_pages, "explanation", lambda setting: text)  # noqa: B023
            assert help_pages._limits(Setting("key", float, 1.0, Setting, limits=limits)) == shown


def test_all_help_of_a_word_shows_the_settings_that_have_it(capsys):
    for words in (["--help-all", "Sink", "--method", "dmd2"], ["--method", "dmd2", "--help-all", "sink"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert re.findall(r"^  --([\w.-]+)", said, re.M) == [
            "sampler.chunks.window-frames",
            "sampler.chunks.sink-frames",
            "sampler.chunks.rolling-sink",
        ]
    assert main(["--method", "dmd2", "--help-all", "learning-rate"]) == 0
    assert "--critic.learning-rate" in capsys.readouterr().out  # as a flag is written
    assert main(["--method", "dmd2", "--help-all", "learnin_rat"]) == 2
    said = capsys.readouterr().err
    assert "--help-all learnin_rat: no setting of dmd2 has it in its name or explanation; did you mean" in said
    assert "student.learning_rate" in said and len(said.splitlines()) == 1


OWN = """
'''Own: a method that does nothing.

More about it.
'''
from dataclasses import dataclass

from unified_trainer.methods.base import Method, SingleUpdateConfig, trained


@dataclass(frozen=True)
class OwnConfig(SingleUpdateConfig):
    weight: float = 0.5
    '''Weight of nothing, which is
    explained on two lines.'''
    silent: bool = True


class Own(Method):
    config_class = OwnConfig
    roles = {"student": trained()}

    def step(self, batch, step, rng, mesh):
        yield
"""


def test_a_method_of_ones_own_has_help_and_flags(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    method = ["--method", f"{tmp_path}/own.py:Own"]
    assert main([*method, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Own: a method that does nothing. Defaults" in said
    assert "Weight of nothing, which is explained on two lines. Default: 0.5." in said
    run = parse([*method, "--algorithm.weight", "2", "--algorithm.no-silent"])
    assert (run.algorithm.weight, run.algorithm.silent) == (2.0, False)
    assert refused(*method, "--algorithm.wight", "2").endswith("did you mean --algorithm.weight?")


# The program.


def test_the_program_says_one_line_and_ends_with_code_2(run_folder):
    done = shell(*command("--method", "dance_gpro", "--output", str(run_folder)))
    assert done.returncode == 2 and "did you mean dance_grpo?" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not run_folder.exists()


def test_the_console_script_is_the_same_program():
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"unified-trainer": "unified_trainer.__main__:run_cli"}
    assert (
        (REPO / "unified_trainer" / "__main__.py").read_text().endswith('if __name__ == "__main__":\n    run_cli()\n')
    )
