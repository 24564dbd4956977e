"""A recipe becomes a configuration, or one line that names the mistake and the fix."""

from pathlib import Path

import pytest
import yaml

from tailrace.config.cluster import ClusterConfig
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.generate import EvalConfig, GenerateConfig, ProfileConfig
from tailrace.config.load import changed_recipe, load_as, load_config, read_recipe
from tailrace.config.prompts import JsonlSource
from tailrace.config.reference import descriptions
from tailrace.config.run import RunConfig
from tailrace.config.trainer import TrainerConfig
from tailrace.config.transfer import LocalQueueConfig, ServiceQueueConfig
from tailrace.errors import ConfigError

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.yaml"


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_overrides_replace_values_of_the_recipe() -> None:
    config = load_config(RECIPE, ["trainer.lr=1e-5", "sampling.stop=[a,b]", "trainer.mini_batch_size=16"])
    assert config.trainer.lr == 1e-5
    assert config.sampling.stop == ("a", "b")
    assert config.mini_batches_per_step == 2
    assert config.trainer.train_batch_size == 32


def test_interpolations_are_resolved() -> None:
    assert load_config(RECIPE, ["output_dir=runs/${seed}"]).output_dir == "runs/0"


def test_a_resolved_configuration_loads_back_unchanged() -> None:
    config = load_config(RECIPE)
    assert load_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_separate_workers_have_a_queue_service_that_keeps_the_keys_given() -> None:
    config = load_config(RECIPE, ["pipeline.placement=separated", "queue.listen=10.0.0.1"])
    assert config.queue == ServiceQueueConfig(listen="10.0.0.1")
    assert load_config(RECIPE, ["pipeline.placement=separated"]).queue == ServiceQueueConfig()
    assert load_config(RECIPE, ["queue.max_rows=99"]).queue == LocalQueueConfig(max_rows=99)
    text = message("pipeline.placement=separated", "queue.type=local")
    assert "queue.type local is inside one process" in text


def test_a_new_type_drops_the_keys_of_the_old_variant() -> None:
    assert load_config(RECIPE, ["engine.type=hf"]).engine.type == "hf"


@pytest.mark.parametrize(
    "overrides",
    [
        ["prompts.source={type: jsonl, path: p.jsonl}"],
        ["prompts.source.type=jsonl", "prompts.source.path=p.jsonl"],
        ["prompts.source.path=p.jsonl", "prompts.source.type=jsonl"],
    ],
)
def test_a_variant_is_chosen_in_any_form_and_order(overrides: list[str]) -> None:
    assert load_config(RECIPE, overrides).prompts.source == JsonlSource(path="p.jsonl")


@pytest.mark.parametrize(
    ("overrides", "type"),
    [
        (["engine={type: native, dp: 2}", "engine.type=hf"], "hf"),
        (["engine.type=hf", "engine={type: native, dp: 2}"], "native"),
        (["engine.type=native", "engine.type=hf"], "hf"),
        (["engine.dp=2", "seed=1", "engine.type=native"], "native"),
    ],
)
def test_the_last_override_of_a_type_counts(overrides: list[str], type: str) -> None:
    assert load_config(RECIPE, overrides).engine.type == type


def test_the_types_of_sections_in_one_another_may_stand_in_any_order() -> None:
    overrides = ["algorithm.rollout_correction.level=token", "algorithm.rollout_correction.type=truncated"]
    for given in ([*overrides, "algorithm.type=dapo"], ["algorithm.type=dapo", *overrides]):
        algorithm = load_config(RECIPE, given).algorithm
        assert algorithm.type == "dapo"
        assert algorithm.rollout_correction is not None
        assert algorithm.rollout_correction.type == "truncated"


def test_a_section_with_a_default_variant_needs_no_type(tmp_path: Path) -> None:
    values = yaml.safe_load(RECIPE.read_text())
    del values["engine"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    assert load_config(recipe, ["engine.dtype=float32"]).engine == NativeEngineConfig(dtype="float32")


def test_a_missing_type_names_the_types(tmp_path: Path) -> None:
    values = yaml.safe_load(RECIPE.read_text())
    del values["prompts"]["source"]["type"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"prompts\.source\.type is required: one of 'jsonl', 'parquet', 'dataset'"):
        load_config(recipe)


def test_repeating_the_type_keeps_the_keys_of_the_variant() -> None:
    config = load_config(RECIPE, ["prompts.source.type=reasoning_gym", "prompts.source.size=100"])
    assert config.prompts.source.type == "reasoning_gym"
    assert config.prompts.source.parameters["max_terms"] == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.lrr=3", "unknown key trainer.lrr; did you mean trainer.lr?"),
        ("lr=3", "unknown key lr; did you mean trainer.lr?"),
        ("engine.dtypee=bfloat16", "unknown key engine.dtypee; did you mean engine.dtype?"),
        ("engine.type=foo", "engine.type is 'foo'; expected one of 'native', 'vllm', 'hf', 'fake'"),
        ("zzz=1", "unknown key zzz; expected one of algorithm, checkpoint"),
        ("trainer.steps=abc", "trainer.steps is 'abc': input should be a valid integer"),
        ("trainer.steps=true", "trainer.steps is true: input should be a valid integer"),
        ("trainer.steps=3.0", "trainer.steps is 3.0: input should be a valid integer"),
        (
            "trainer.steps='3'",
            "trainer.steps is '3'; expected an integer, not the text of one; write it without quotes",
        ),
        ("trainer.lr='1e-5'", "trainer.lr is '1e-5'; expected a number, not the text of one; write it without quotes"),
        ("trainer.lr=true", "trainer.lr is true: input should be a valid number"),
        ("sampling.ignore_eos=1", "sampling.ignore_eos is 1: input should be true or false"),
        ("sampling.stop_token_ids=[true]", "input should be a valid integer"),
        ("trainer.betas=[0.9, 'x']", "input should be a valid number"),
        ("seed=true", "seed is true: input should be a valid integer"),
        ("seed=1e30", "seed is 1e+30: input should be a valid integer"),
        ("seed=-1", "seed is -1: input should be greater than or equal to 0"),
        ("threads=1000000000000000000000000000000", "input should be less than or equal to 1024"),
        ("algorithm.clip_high=1e308", "algorithm.clip_high is 1e+308: input should be less than or equal to 1000000"),
        *(
            (f"device={device}", f"device is '{device}'; expected cpu, cuda, cuda:N")
            for device in ("meta", "cpu:7", "cpu:0", "xla", "CPU", "cuda:-1", "cuda:x", "cuda:9999", "hpu", "gpu")
        ),
        ("trainer.steps=0", "trainer.steps is 0, which trains nothing; to evaluate"),
        ("sampling.temperature=1.0e46", "sampling.temperature is 1e+46: input should be less than or equal to 1000000"),
        ("sampling.top_p=1.0e-46", "sampling.top_p is 1e-46: input should be greater than or equal to 0.000001"),
        (f"sampling.top_k={2**63}", "input should be less than 2147483648"),
        ("engine.step_timeout_s=1.0e8", "input should be less than or equal to 1000000"),
        ("engine.threads_per_rank=1000000", "input should be less than or equal to 1024"),
        ("rewards.workers=100000", "rewards.workers is 100000: input should be less than or equal to 1024"),
        ("queue={type: service, lease_s: 0.5}", "queue.lease_s is 0.5: input should be greater than or equal to 1"),
        ("queue={type: service, client_limit_s: 0.1}", "queue.client_limit_s is 0.1: input should be greater"),
        ("queue={type: service, storage: {max_bytes: 99}}", "queue.storage.max_bytes is 99: input should be greater"),
        ("engine.kv_cache_gib=1.0e300", "input should be less than or equal to 1000000"),
        ("trainer.lr=.nan", "trainer.lr is .nan: input should be a finite number"),
        ("algorithm.group_size=1", "algorithm.group_size is 1: this algorithm compares the samples of a group"),
        ("trainer.train_batch_size=30", "does not divide into groups of algorithm.group_size 8; use 24 or 32"),
        ("trainer.mini_batch_size=12", "trainer.mini_batch_size 12 must be a multiple of algorithm.group_size 8"),
        ("queue.max_rows=16", "queue.max_rows 16 cannot hold the 32 rows of a step"),
        ("sampling.temperature=0", "sampling.temperature is 0: the greedy samples of a group are all equal"),
        (
            "engine={type: native, dp: 2, adaptive_tp: {estimate: ranked}}",
            "engine.adaptive_tp.estimate ranked needs to be told how long each response is expected to be",
        ),
        ("pipeline.in_order=true", "pipeline.in_order needs pipeline.streaming: true"),
        ("rewards.grader.pattern='('", "rewards.grader.pattern is not a regular expression"),
        ("sampling.stop=['']", "sampling.stop has an empty string, which would end every response at once"),
        ("sampling.stop=5", "sampling.stop is 5; expected a list: sampling.stop=[5]"),
        ("sampling.stop_token_ids=5", "sampling.stop_token_ids is 5; expected a list: sampling.stop_token_ids=[5]"),
        ("engine.grammar=vllm", "unknown key engine.grammar; did you mean engine.type=vllm?"),
        ("engine.adaptive_tp={degrees: []}", "several ranks"),
        (
            "engine={type: native, dp: 2, adaptive_tp: {preset: pat, least_gain: 0.1}}",
            "with preset pat has least_gain 0.1, where PAT has 0.0; leave one of them out",
        ),
        ("engine.grammar={a: 1}", "unknown key engine.grammar; expected one of adaptive_tp, block_size"),
        ("engine.link={latency_us:1}", "YAML needs a space after the colon: latency_us: 1"),
        (
            "prompts.source.split=x",
            "unknown key prompts.source.split; it belongs to prompts.source.type dataset or hub",
        ),
        ("prompts.source.type=jsonl", "prompts.source.path is required and missing"),
        ("output_dir=${nope}", "Interpolation key 'nope' not found"),
        ("prompts.path=x", "unknown key prompts.path; did you mean prompts.source.path?"),
        ("rewards.path=m.f", "did you mean rewards.grader.path?"),
        ("path=x", "did you mean model.path?"),
        ("max_bytes=9", "did you mean queue.max_bytes?"),
        ("weights.zoom=x", "unknown key weights.zoom; expected one of"),
        ("foo", "'foo' is not of the form key=value"),
        ("=3", "'=…' is not of the form key=value"),
        ("trainer=3", "trainer is 3; expected keys, such as trainer.backend"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(override: str, expected: str) -> None:
    assert expected in message(override)


def test_a_key_of_another_variant_names_that_variant() -> None:
    assert message("engine.type=hf", "engine.tp=2").endswith("unknown key engine.tp; it belongs to engine.type native")


@pytest.mark.parametrize(("given", "stop"), [("x", ("x",)), ('["\\n"]', ("\n",)), ("[]", ())])
def test_a_stop_string_needs_no_list(given: str, stop: tuple[str, ...]) -> None:
    assert load_config(RECIPE, [f"sampling.stop={given}"]).sampling.stop == stop


def test_another_command_takes_what_it_has_of_a_training_recipe() -> None:
    trained = load_config(RECIPE)
    config = load_as(GenerateConfig, RECIPE, ["sampling.temperature=0"])
    assert (config.model, config.engine, config.seed) == (trained.model, trained.engine, trained.seed)
    assert config.sampling == trained.sampling.model_copy(update={"temperature": 0})
    assert config.prompts.system_prompt == trained.prompts.system_prompt
    assert config.prompts.source is None
    assert load_as(ProfileConfig, RECIPE).model == trained.model


def test_an_evaluation_holds_out_what_the_run_of_the_recipe_does() -> None:
    recipe = {
        "output_dir": "x",
        "prompts": {"source": {"type": "jsonl", "path": "p"}},
        "rewards": {"grader": {"type": "exact"}},
    }
    assert load_as(EvalConfig, recipe).prompts.held_out == load_config(recipe).prompts.held_out == 64
    assert load_as(EvalConfig, recipe, ["prompts.held_out=3"]).prompts.held_out == 3
    del recipe["output_dir"]  # without it, the recipe is an evaluation's
    assert load_as(EvalConfig, recipe).prompts.held_out is None


def test_prompts_of_a_command_take_the_place_of_those_of_the_training_recipe() -> None:
    recipe = {
        "output_dir": "x",
        "prompts": {
            "source": {"type": "jsonl", "path": "p", "prompt_column": "question"},
            "validation": {"other": {"type": "jsonl", "path": "${prompts.source.path}.other"}},
            "system_prompt": "${prompts.source.prompt_column}, ${trainer.steps}",
        },
        "rewards": {"grader": {"type": "exact"}},
        "trainer": {"steps": 7},
    }
    given = "prompts.source={type: jsonl, path: mine.jsonl, answer_column: null}"
    config = load_as(GenerateConfig, recipe, [given])
    assert config.prompts.source == JsonlSource(path="mine.jsonl", answer_column=None)
    assert config.prompts.system_prompt == "question, 7"
    assert load_as(GenerateConfig, recipe).prompts.source is None
    evaluated = load_as(EvalConfig, recipe, ["prompts.source.path=mine.jsonl", "prompts.held_out=null"])
    assert evaluated.prompts.source == JsonlSource(path="mine.jsonl", prompt_column="question")
    assert evaluated.prompts.held_out is None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("trainer.lr=1", "trainer.lr"),
        ("trainer.no_such_key=1", "trainer"),
        ("prompts.shuffle=false", "prompts.shuffle"),
        ("output_dir=x", "output_dir"),
        ("pipeline={streaming: true}", "pipeline.streaming"),
    ],
)
def test_a_change_for_training_is_refused_where_nothing_is_trained(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is for training, and this command trains nothing; leave it out$"):
        load_as(EvalConfig, RECIPE, [override])


def test_a_change_of_a_key_that_no_command_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key prompts\.held_outt; did you mean prompts\.held_out"):
        load_as(EvalConfig, RECIPE, ["prompts.held_outt=3"])


def test_a_key_that_no_recipe_has_is_told_of_a_training_recipe_too(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.read_text() + "\nsamplign: {}\n")
    with pytest.raises(ConfigError, match=r"unknown key samplign; did you mean sampling"):
        load_as(GenerateConfig, recipe)


def test_every_grader_checks_its_pattern_before_anything_starts() -> None:
    assert "rewards.grader.pattern is not a regular expression" in message(
        "rewards.grader.type=reasoning_gym", "rewards.grader.pattern='('"
    )


def test_several_mistakes_name_the_first_and_count_the_rest() -> None:
    assert message("trainer.lrr=3", "seeed=1").endswith("(and 1 more)")


def test_a_missing_recipe_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*quickstart\.yaml\?"):
        load_config(RECIPE.with_name("quikstart.yaml"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just words", ""])
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert "\n" not in str(caught.value)


def test_every_field_has_a_description_or_a_telling_type() -> None:
    assert descriptions(TrainerConfig).keys() == TrainerConfig.model_fields.keys()


@pytest.mark.parametrize("recipe", sorted(RECIPE.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_that_ships_is_valid(recipe: Path) -> None:
    load_config(recipe)


def test_a_queue_listens_at_an_address_that_others_can_be_told() -> None:
    text = message("queue.type=service", "queue.listen=0.0.0.0")
    assert "queue.listen 0.0.0.0 is the address of no machine" in text


def test_a_worker_may_be_silent_for_longer_than_between_two_beats() -> None:
    with pytest.raises(ValueError, match=r"is 0\.5, and a healthy worker may be silent for 1\.5 s; use 3 or more"):
        ClusterConfig(heartbeat_limit_s=0.5)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.rollout_correction=none", "did you mean algorithm.rollout_correction.type=none?"),
        ("cluster.rollout.cores='0,1'", "expected a list: cluster.rollout.cores=[0,1]"),
        ("cluster.rollout.cores=[0,0]", "cluster.rollout.cores is [0, 0], with a core twice"),
        ("cluster.trainer.workers=2", "cluster.trainer has 2 workers, and one process trains"),
        ("cluster.rollout.cpus=0.00001", "cluster.rollout.cpus is 1e-05, and Ray counts in parts of 0.0001"),
        (
            "cluster.rollout.resources={GPU: 1}",
            "cluster.rollout.resources has GPU, which has a key of its own: use gpus",
        ),
        ("weights.chunk_mib=1e-9", "weights.chunk_mib is 1e-09: input should be greater than or equal to 0.001"),
        ("trainer.steps=[1,null,true]", "trainer.steps is [1, null, true]: input should be a valid integer"),
        ("trainer=null", "trainer is null; expected keys, such as trainer.backend"),
        ("prompts.validation=3", "prompts.validation is 3: input should be a mapping"),
        ("rewards.grader={type: function, path: m.f, arguments: [1]}", "arguments is [1]: input should be a mapping"),
        ("sampling.temperature={a b: .inf}", "sampling.temperature is {'a b': .inf}: input should be a valid number"),
        ('sampling.stop_token_ids="a\\nb"', "expected a list: sampling.stop_token_ids=[…]"),
        (f"sampling.stop_token_ids={'9 ' * 999}", "expected a list: sampling.stop_token_ids=[…]"),
        ("sampling.stop_token_ids=true", "expected a list: sampling.stop_token_ids=[true]"),
        ("pipeline.mode=async", "a mode is a choice of pipeline.placement"),
    ],
)
def test_a_value_of_the_wrong_form_says_the_right_one(override: str, says: str) -> None:
    assert says in message(override)


@pytest.mark.parametrize(
    ("flags", "device", "chosen"),
    [
        ("avx2 avx512f avx512_bf16", "cpu", ("bf16", "bfloat16")),
        ("asimd bf16", "cpu", ("bf16", "bfloat16")),
        ("avx2 avx512f", "cpu", ("fp32", "float32")),
        ("", "cpu", ("fp32", "float32")),
        ("avx2", "cuda:0", ("bf16", "bfloat16")),
    ],
)
def test_a_run_computes_in_bfloat16_by_default_where_the_device_can(
    monkeypatch: pytest.MonkeyPatch, flags: str, device: str, chosen: tuple[str, str]
) -> None:
    monkeypatch.setattr("tailrace.host.cpu.cpu_flags", lambda: frozenset(flags.split()))

    def choice(config: RunConfig) -> tuple[str, str]:
        assert isinstance(config.engine, NativeEngineConfig)
        return config.trainer.precision, config.engine.dtype

    config = load_config(RECIPE, [f"device={device}"])
    assert choice(config) == chosen
    assert load_config(config.model_dump()) == config
    bare = {key: value for key, value in config.model_dump().items() if key not in ("engine", "trainer")}
    assert choice(load_config(bare)) == chosen
    asked = [f"device={device}", "engine.dtype=bfloat16", "trainer.precision=bf16"]
    assert choice(load_config(RECIPE, asked)) == ("bf16", "bfloat16")
    asked = [f"device={device}", "engine.dtype=float32", "trainer.precision=fp32"]
    assert choice(load_config(RECIPE, asked)) == ("fp32", "float32")
    generated = load_as(GenerateConfig, None, [f"device={device}"])
    assert getattr(generated.engine, "dtype", None) == chosen[1]


def test_interpolations_too_deep_to_resolve_are_one_line() -> None:
    with pytest.raises(ConfigError, match="interpolations in interpolations, too deep to be resolved"):
        load_config({}, ["seed=" + "${a:" * 400 + "}" * 400])


@pytest.mark.parametrize(("lengths", "order"), [("null", "first_in"), ("{type: history}", "longest_first")])
def test_the_order_that_is_left_open_is_chosen_by_lengths(lengths: str, order: str) -> None:
    config = load_config(RECIPE, [f"rollout.lengths={lengths}"])
    assert config.rollout.dispatch.order is None
    assert config.resolved.rollout.dispatch.order == order


def test_a_changed_recipe_is_the_one_that_is_loaded_though_a_type_is_given_last(tmp_path: Path) -> None:
    overrides = ["engine.max_new=1", "engine.type=adapter"]
    (path := tmp_path / "recipe.yaml").write_text("engine: {type: native, tp: 2}\n")
    assert changed_recipe(path, overrides) == {"engine": {"type": "adapter", "max_new": 1}}


def test_a_plan_beside_a_recipe_is_found_wherever_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "planned.yaml").write_text(RECIPE.read_text() + "observe: {plan: planned.plan.json}")
    assert load_config(tmp_path / "planned.yaml").observe.plan == str(tmp_path / "planned.plan.json")
    given = load_config(tmp_path / "planned.yaml", ["observe.plan=other.json"])
    assert given.observe.plan == "other.json"
    assert read_recipe(tmp_path / "planned.yaml")["observe"]["plan"] == str(tmp_path / "planned.plan.json")
    (tmp_path / "home.yaml").write_text(RECIPE.read_text() + "observe: {plan: ~/plan.json}")
    assert load_config(tmp_path / "home.yaml").observe.plan == str(Path.home() / "plan.json")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/mine.yaml").write_text("base: ../planned.yaml")
    of_base = load_config(tmp_path / "sub/mine.yaml").observe.plan
    assert of_base is not None
    assert Path(of_base).resolve() == tmp_path / "planned.plan.json"
