use std::ffi::OsString;
use std::path::PathBuf;

use super::*;

/// Every public spelling, by hand: key | flag | variable | default | another value | that value in
/// TOML. A line that changes here breaks somebody's scripts and files.
const SURFACE: &str = "\
preset | --preset | FLAMIA_PRESET | tiny | byte-75m | 'byte-75m'
data | --data | FLAMIA_DATA | the built-in corpus: Markdown and Rust sources of this build's dependencies | shards | 'shards'
tokenizer | --tokenizer | FLAMIA_TOKENIZER | bytes | t.json | 't.json'
out | --out | FLAMIA_OUT | runs/<UTC time>-<attention> | runs/a b | 'runs/a b'
resume | --resume | FLAMIA_RESUME | false | true | true
attention | --attention | FLAMIA_ATTENTION | mxfp8 | sdpa | 'sdpa'
device | --device | FLAMIA_DEVICE | auto | cuda:3 | 'cuda:3'
threads | --threads | FLAMIA_THREADS | 0 | 2 | 2
seed | --seed | FLAMIA_SEED | 0 | 9223372036854775807 | 9223372036854775807
steps | --steps | FLAMIA_STEPS | 1000 | 2000 | 2000
model.dim | --model-dim | FLAMIA_MODEL_DIM | 128 | 512 | 512
model.layers | --model-layers | FLAMIA_MODEL_LAYERS | 4 | 2 | 2
model.heads | --model-heads | FLAMIA_MODEL_HEADS | 2 | 8 | 8
model.kv_heads | --model-kv-heads | FLAMIA_MODEL_KV_HEADS | 1 | 2 | 2
model.head_dim | --model-head-dim | FLAMIA_MODEL_HEAD_DIM | 64 | 128 | 128
model.ffn_dim | --model-ffn-dim | FLAMIA_MODEL_FFN_DIM | 384 | 96 | 96
model.tied | --model-tied | FLAMIA_MODEL_TIED | true | false | false
model.rope_theta | --model-rope-theta | FLAMIA_MODEL_ROPE_THETA | 10000.0 | 500000 | 500000
model.norm_eps | --model-norm-eps | FLAMIA_MODEL_NORM_EPS | 1e-5 | 1e-6 | 1e-6
model.init_std | --model-init-std | FLAMIA_MODEL_INIT_STD | 0.05 | 0.01 | 0.01
batch.row_tokens | --batch-row-tokens | FLAMIA_BATCH_ROW_TOKENS | 512 | 2 | 2
batch.rows | --batch-rows | FLAMIA_BATCH_ROWS | 4 | 1 | 1
batch.accumulate | --batch-accumulate | FLAMIA_BATCH_ACCUMULATE | 1 | 8 | 8
batch.packing | --batch-packing | FLAMIA_BATCH_PACKING | best-fit | concat | 'concat'
optim.lr | --optim-lr | FLAMIA_OPTIM_LR | 0.002 | 3e-4 | 3e-4
optim.min_lr_ratio | --optim-min-lr-ratio | FLAMIA_OPTIM_MIN_LR_RATIO | 0.1 | 0 | 0
optim.warmup | --optim-warmup | FLAMIA_OPTIM_WARMUP | 150 | 0 | 0
optim.beta1 | --optim-beta1 | FLAMIA_OPTIM_BETA1 | 0.9 | 0.8 | 0.8
optim.beta2 | --optim-beta2 | FLAMIA_OPTIM_BETA2 | 0.95 | 0.99 | 0.99
optim.eps | --optim-eps | FLAMIA_OPTIM_EPS | 1e-8 | 1e-6 | 1e-6
optim.weight_decay | --optim-weight-decay | FLAMIA_OPTIM_WEIGHT_DECAY | 0.1 | 0 | 0.0
optim.clip | --optim-clip | FLAMIA_OPTIM_CLIP | 1.0 | 0.5 | 0.5
compute.precision | --compute-precision | FLAMIA_COMPUTE_PRECISION | auto | bf16 | 'bf16'
compute.loss_chunk | --compute-loss-chunk | FLAMIA_COMPUTE_LOSS_CHUNK | 0 | 100 | 100
compute.peak_tflops | --compute-peak-tflops | FLAMIA_COMPUTE_PEAK_TFLOPS | 0.0 | 989 | 989
kernel.profile | --kernel-profile | FLAMIA_KERNEL_PROFILE | auto | hopper | 'hopper'
kernel.backend | --kernel-backend | FLAMIA_KERNEL_BACKEND | auto | host | 'host'
kernel.window | --kernel-window | FLAMIA_KERNEL_WINDOW | 0 | 64 | 64
kernel.hadamard | --kernel-hadamard | FLAMIA_KERNEL_HADAMARD | auto | off | 'off'
kernel.exact | --kernel-exact | FLAMIA_KERNEL_EXACT | false | true | true
kernel.operand_scales | --kernel-operand-scales | FLAMIA_KERNEL_OPERAND_SCALES | auto | token | 'token'
kernel.ds_exponent | --kernel-ds-exponent | FLAMIA_KERNEL_DS_EXPONENT | auto | row | 'row'
kernel.dq | --kernel-dq | FLAMIA_KERNEL_DQ | auto | fp16-causal | 'fp16-causal'
kernel.backward | --kernel-backward | FLAMIA_KERNEL_BACKWARD | auto | two-kernel | 'two-kernel'
kernel.c | --kernel-c | FLAMIA_KERNEL_C | 4 | 3 | 3
kernel.tau | --kernel-tau | FLAMIA_KERNEL_TAU | 4.0 | 4.5 | 4.5
kernel.normaliser | --kernel-normaliser | FLAMIA_KERNEL_NORMALISER | auto | unrounded | 'unrounded'
kernel.exponential | --kernel-exponential | FLAMIA_KERNEL_EXPONENTIAL | exact | polynomial | 'polynomial'
kernel.polynomial_degree | --kernel-polynomial-degree | FLAMIA_KERNEL_POLYNOMIAL_DEGREE | 3 | 5 | 5
kernel.polynomial_eighths | --kernel-polynomial-eighths | FLAMIA_KERNEL_POLYNOMIAL_EIGHTHS | 4 | 8 | 8
kernel.value_scales | --kernel-value-scales | FLAMIA_KERNEL_VALUE_SCALES | diagonal | everywhere | 'everywhere'
kernel.v_fold | --kernel-v-fold | FLAMIA_KERNEL_V_FOLD | auto | on | 'on'
kernel.k_fold | --kernel-k-fold | FLAMIA_KERNEL_K_FOLD | auto | on | 'on'
kernel.dk_rounding | --kernel-dk-rounding | FLAMIA_KERNEL_DK_ROUNDING | auto | stochastic | 'stochastic'
kernel.ablate | --kernel-ablate | FLAMIA_KERNEL_ABLATE | none | unquantised-d | 'unquantised-d'
eval.every | --eval-every | FLAMIA_EVAL_EVERY | 100 | 10 | 10
eval.rows | --eval-rows | FLAMIA_EVAL_ROWS | 64 | 1 | 1
eval.fraction | --eval-fraction | FLAMIA_EVAL_FRACTION | 0.05 | 0.5 | 0.5
checkpoint.every | --checkpoint-every | FLAMIA_CHECKPOINT_EVERY | 200 | 7 | 7
checkpoint.keep | --checkpoint-keep | FLAMIA_CHECKPOINT_KEEP | 2 | 1 | 1
checkpoint.best | --checkpoint-best | FLAMIA_CHECKPOINT_BEST | true | false | false
guard.skip_limit | --guard-skip-limit | FLAMIA_GUARD_SKIP_LIMIT | 10 | 3 | 3
guard.spike_window | --guard-spike-window | FLAMIA_GUARD_SPIKE_WINDOW | 128 | 64 | 64
guard.spike_factor | --guard-spike-factor | FLAMIA_GUARD_SPIKE_FACTOR | 10.0 | 6.5 | 6.5
guard.spike_reports | --guard-spike-reports | FLAMIA_GUARD_SPIKE_REPORTS | 20 | 0 | 0
log.every | --log-every | FLAMIA_LOG_EVERY | 1 | 5 | 5
distributed.lost_after | --distributed-lost-after | FLAMIA_DISTRIBUTED_LOST_AFTER | 30.0 | 5 | 5
distributed.patience | --distributed-patience | FLAMIA_DISTRIBUTED_PATIENCE | 600.0 | 60 | 60
distributed.bucket_mib | --distributed-bucket-mib | FLAMIA_DISTRIBUTED_BUCKET_MIB | 25 | 1 | 1";

fn surface() -> Vec<[&'static str; 6]> {
    let cells = |line: &'static str| line.split(" | ").collect::<Vec<_>>().try_into().unwrap();
    SURFACE.lines().map(cells).collect()
}

/// The attention that has the setting `path`: some are one path's only.
fn attention_of(path: &str) -> &'static str {
    match path {
        "attention" => "reference",
        "kernel.value_scales" | "kernel.v_fold" | "kernel.k_fold" | "kernel.dk_rounding" => "fp4",
        _ => "mxfp8",
    }
}

fn load(args: &[&str], env: &[(&str, &str)]) -> Result<Settings, SettingsError> {
    let env = env
        .iter()
        .map(|(name, value)| (OsString::from(name), OsString::from(value)));
    Settings::load_from(args.iter().map(OsString::from), env)
}

struct Toml {
    folder: tempfile::TempDir,
}

impl Toml {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("run.toml"), text).unwrap();
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("run.toml")
    }

    fn load(&self, args: &[&str], env: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        let path = self.path();
        load(&[&["--config", path.to_str().unwrap()], args].concat(), env)
    }
}

fn error(result: Result<Settings, SettingsError>) -> String {
    result.expect_err("must be refused").to_string()
}

fn without_origins(mut settings: Settings) -> Settings {
    settings.origins.clear();
    settings
}

#[test]
fn the_public_surface_is_frozen() {
    let table: Vec<_> = keys()
        .iter()
        .map(|k| [k.path, &format!("--{}", k.flag), &k.variable, &k.default].join(" | "))
        .collect();
    let frozen: Vec<_> = surface().iter().map(|row| row[..4].join(" | ")).collect();
    assert_eq!(table, frozen);
}

#[test]
fn every_setting_can_be_spelled_as_flag_variable_and_toml() {
    for [path, flag, variable, default, text, toml] in surface() {
        let file = Toml::new(&format!("attention = '{}'", attention_of(path)));
        let config = file.path().display().to_string();
        let load = |args: &[&str], env: &[(&str, &str)]| {
            load(&[&["--config", &config], args].concat(), env).unwrap()
        };
        let defaults = without_origins(load(&[], &[]));
        let by_flag = load(&[flag, text], &[]);
        let by_equals = load(&[&format!("{flag}={text}")], &[]);
        let by_variable = load(&[], &[(variable, text)]);
        let other = match path {
            "attention" => String::new(),
            _ => format!("attention = '{}'\n", attention_of(path)),
        };
        let by_file = Toml::new(&format!("{other}{path} = {toml}"))
            .load(&[], &[])
            .unwrap();

        assert_eq!(by_flag.origin(path), Some(&*format!("flag {flag}")));
        assert_eq!(
            by_variable.origin(path),
            Some(&*format!("environment {variable}"))
        );
        assert!(
            by_file.origin(path).unwrap().ends_with("run.toml"),
            "{path}"
        );

        let by_flag = without_origins(by_flag);
        assert_ne!(
            by_flag, defaults,
            "{path} = {text} changed nothing from {default}"
        );
        assert_eq!(by_flag, without_origins(by_equals), "{path}");
        assert_eq!(by_flag, without_origins(by_variable), "{path}");
        assert_eq!(by_flag, without_origins(by_file), "{path}");
    }
}

#[test]
fn values_land_in_their_fields() {
    let file =
        Toml::new("seed = 7\n[model]\nkv_heads = 2\nrope_theta = 500000\n[optim]\nbeta1 = 0.8");
    let settings = file
        .load(
            &["--device", "cuda", "--model-tied", "false", "--out", "here"],
            &[],
        )
        .unwrap();
    let expected = Settings {
        seed: 7,
        device: Device::Cuda(0),
        out: Some("here".into()),
        model: ModelSettings {
            kv_heads: 2,
            rope_theta: 500_000.0,
            tied: false,
            ..ModelSettings::default()
        },
        optim: OptimSettings {
            beta1: 0.8,
            ..OptimSettings::default()
        },
        ..Settings::default()
    };
    assert_eq!(without_origins(settings), expected);
}

#[test]
fn variables_of_the_kernels_are_no_settings() {
    let kernels = flamia_cuda::ENVIRONMENT.map(|name| (name, "/somewhere"));
    let settings = load(&[], &[&kernels[..], &[("FLAMIA_SEED", "3")]].concat()).unwrap();
    assert_eq!(settings.seed, 3);
}

#[test]
fn flags_win_over_the_environment_over_the_file_over_defaults() {
    let file = Toml::new("steps = 101\nseed = 101\nthreads = 101");
    let env = [
        ("FLAMIA_STEPS", "102"),
        ("FLAMIA_SEED", "102"),
        ("OTHER_SEED", "x"),
    ];
    let settings = file.load(&["--steps", "103"], &env).unwrap();
    assert_eq!(settings.steps, 103);
    assert_eq!(settings.seed, 102);
    assert_eq!(settings.threads, 101);
    assert_eq!(settings.batch.rows, 4);
    assert_eq!(settings.origin("steps"), Some("flag --steps"));
    assert_eq!(settings.origin("seed"), Some("environment FLAMIA_SEED"));
    assert_eq!(settings.origin("batch.rows"), None);
}

#[test]
fn a_short_run_has_a_short_warm_up() {
    let settings = load(&["--steps", "20"], &[]).unwrap();
    assert_eq!(settings.optim.warmup, 4);
    assert_eq!(
        settings.origin("optim.warmup"),
        Some("a fifth of the steps")
    );
    let settings = load(&["--steps", "150"], &[]).unwrap();
    assert_eq!(settings.optim.warmup, 150);
}

#[test]
fn a_resumed_run_keeps_its_settings_until_told_otherwise() {
    let saved = Toml::new("steps = 50\nseed = 50\n[model]\nlayers = 1\n[optim]\nwarmup = 1");
    let args = ["--resume", "--steps", "60"].map(OsString::from);
    let env = [("FLAMIA_SEED".into(), "61".into())];
    let settings = Settings::load_resuming(&saved.path(), args, env).unwrap();
    assert!(settings.resume);
    assert_eq!(
        (settings.steps, settings.seed, settings.model.layers),
        (60, 61, 1)
    );
}

#[test]
fn a_preset_stands_between_defaults_and_everything_that_is_said() {
    let file = Toml::new("preset = 'llama-1b'\n[model]\nlayers = 3");
    let settings = file.load(&["--model-dim", "512"], &[("FLAMIA_OPTIM_LR", "1e-3")]);
    let settings = settings.unwrap();
    let model = &settings.model;
    assert_eq!(settings.preset, Preset::Llama1b);
    assert_eq!((model.layers, model.dim, model.ffn_dim), (3, 512, 8192));
    assert_eq!((model.heads, model.kv_heads, model.head_dim), (16, 4, 128));
    assert_eq!(settings.optim.lr, 1e-3);
    assert_eq!(settings.origin("model.ffn_dim"), Some("preset llama-1b"));
    assert_eq!(settings.origin("model.dim"), Some("flag --model-dim"));

    // The one that is said last is the one.
    let settings = file.load(&["--preset", "byte-75m"], &[]).unwrap();
    assert_eq!((settings.model.dim, settings.model.layers), (1024, 3));
    assert_eq!(settings.model.kv_heads, 8);
    // A short run is warmed up shortly all the same.
    let short = load(&["--preset", "byte-75m", "--steps", "50"], &[]).unwrap();
    assert_eq!(short.optim.warmup, 10);
    // What a run was started with wins over a preset that it is resumed with.
    let saved = Toml::new("preset = 'tiny'\n[model]\ndim = 64");
    let args = ["--preset", "llama-8b"].map(OsString::from);
    let settings = Settings::load_resuming(&saved.path(), args, []).unwrap();
    assert_eq!((settings.model.dim, settings.model.layers), (64, 32));
}

#[test]
fn presets_are_the_models_of_their_names() {
    // Parameters that are multiplied with, counted by hand.
    for (name, expected) in [
        ("tiny", 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)),
        ("byte-75m", 6 * (4 * 1024 * 1024 + 3 * 1024 * 2816)),
        (
            "llama-1b",
            16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192),
        ),
        (
            "llama-8b",
            32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336_usize),
        ),
    ] {
        let model = load(&["--preset", name], &[]).unwrap().model;
        let (q, kv) = (
            model.heads * model.head_dim,
            model.kv_heads * model.head_dim,
        );
        let layer = model.dim * (2 * q + 2 * kv + 3 * model.ffn_dim);
        assert_eq!(model.layers * layer, expected, "{name}");
    }
}

#[test]
fn unknown_names_are_refused_with_the_nearest_known_one() {
    for (toml, found, nearest) in [
        ("step = 3", "step", "steps"),
        ("dim = 3", "dim", "model.dim"),
        ("[model]\nkv_head = 3", "model.kv_head", "model.kv_heads"),
        ("[modle]\ndim = 3", "modle.dim", "model.dim"),
        ("[modle]", "modle", "model"),
        ("[model.dims]\nx = 3", "model.dims.x", "model.dim"),
        ("[[optim2]]\nlr = 3", "optim2", "optim"),
    ] {
        let file = Toml::new(toml);
        let place = file.path().display().to_string();
        let expected = format!("{place}: there is no setting {found}; the nearest is {nearest}");
        assert_eq!(error(file.load(&[], &[])), expected);
    }
    assert_eq!(
        error(load(&[], &[("FLAMIA_MODEL_DIMS", "3")])),
        "environment: there is no setting FLAMIA_MODEL_DIMS; the nearest is FLAMIA_MODEL_DIM",
    );
    assert!(error(load(&[], &[("FLAMIA_CONFIG", "x")])).contains("FLAMIA_CONFIG"));
    let flag = error(load(&["--model-dims", "3"], &[]));
    assert!(
        flag.contains("--model-dims") && flag.contains("'--model-dim'"),
        "{flag}"
    );
}

#[test]
fn wrong_types_are_refused_with_the_expected_type_and_the_value() {
    for (toml, rest) in [
        (
            "steps = 3.7",
            "steps must be a whole number from 0 to 2^63-1, found 3.7",
        ),
        (
            "steps = '3'",
            "steps must be a whole number from 0 to 2^63-1, found the string \"3\"",
        ),
        (
            "steps = true",
            "steps must be a whole number from 0 to 2^63-1, found true",
        ),
        (
            "steps = -3",
            "steps must be a whole number from 0 to 2^63-1, found -3",
        ),
        (
            "steps = [3]",
            "steps must be a whole number from 0 to 2^63-1, found an array",
        ),
        (
            "[steps]\nx = 3",
            "steps must be a whole number from 0 to 2^63-1, found a table",
        ),
        ("model = 3", "model must be a table, [model], found 3"),
        ("out = 3", "out must be a path, found 3"),
        ("out = ''", "out must be a path, found the string \"\""),
        ("resume = 1", "resume must be true or false, found 1"),
        (
            "optim.lr = '1e-3'",
            "optim.lr must be a finite number, found the string \"1e-3\"",
        ),
        (
            "optim.lr = nan",
            "optim.lr must be a finite number, found NaN",
        ),
        (
            "kernel.hadamard = true",
            "kernel.hadamard must be one of auto, on, off, found true",
        ),
        (
            "device = 'gpu'",
            "device must be one of auto, cpu, cuda, cuda:N, found the string \"gpu\"",
        ),
    ] {
        let file = Toml::new(toml);
        let expected = format!("{}: {rest}", file.path().display());
        assert_eq!(error(file.load(&[], &[])), expected);
    }
    assert_eq!(
        error(load(&["--optim-lr", "fast"], &[])),
        "flag --optim-lr: optim.lr must be a finite number, found \"fast\"",
    );
    assert_eq!(
        error(load(&["--steps", "-3"], &[])),
        "flag --steps: steps must be a whole number from 0 to 2^63-1, found \"-3\"",
    );
    assert_eq!(
        error(load(&[], &[("FLAMIA_ATTENTION", "mxfp4")])),
        "environment FLAMIA_ATTENTION: attention must be one of reference, mxfp8, nvfp4, fp4, sdpa, flash, \
         found \"mxfp4\"",
    );
    assert!(error(load(&["--device", "cuda:-1"], &[])).contains("cuda:-1"));
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_not_utf8_is_refused() {
    use std::os::unix::ffi::OsStringExt;
    let env = [(
        OsString::from("FLAMIA_OUT"),
        OsString::from_vec(vec![b'a', 0xff]),
    )];
    let message = error(Settings::load_from([], env));
    assert_eq!(
        message,
        "environment FLAMIA_OUT: out must be a path, found \"a\\xFF\""
    );
}

#[test]
fn files_that_cannot_be_read_are_refused_by_name() {
    let missing = error(load(&["--config", "no/such.toml"], &[]));
    assert!(
        missing.starts_with("cannot read the settings file no/such.toml: "),
        "{missing}"
    );
    let file = Toml::new("steps = \n");
    let syntax = error(file.load(&[], &[]));
    assert!(
        syntax.contains("run.toml is not valid TOML") && syntax.contains("line 1"),
        "{syntax}"
    );
    let twice = error(Toml::new("steps = 1\nsteps = 2").load(&[], &[]));
    assert!(twice.contains("duplicate key"), "{twice}");
}

#[test]
fn broken_rules_name_the_fields_the_values_and_the_fix() {
    assert_eq!(
        error(load(&["--model-heads", "6", "--model-kv-heads", "4"], &[])),
        "model.heads = 6 (flag --model-heads) and model.kv_heads = 4 (flag --model-kv-heads): \
         the query heads must be a multiple of the key and value heads that they share; \
         give --model-kv-heads one of 1, 2, 3, 6",
    );
    assert_eq!(
        error(load(&["--steps", "20", "--optim-warmup", "21"], &[])),
        "steps = 20 (flag --steps) and optim.warmup = 21 (flag --optim-warmup): \
         the warm-up would be longer than the run; give --optim-warmup 2, or more --steps",
    );
}

/// What goes with what is the kernels' to say; the settings say where it was asked for.
#[test]
fn numerics_that_the_kernels_refuse_are_told_in_words_of_the_settings() {
    let saturates = "kernel.c = 8 (flag --kernel-c) and kernel.tau = 2.0 (flag --kernel-tau): c + tau \
        = 8 + 2 exceeds log2(448) = 8.807: probabilities would saturate silently; lower one of them";
    let inference = "kernel.exponential = schraudolph (flag --kernel-exponential): the schraudolph \
        exponential is for inference only";
    for (args, told) in [
        ("--kernel-c 8 --kernel-tau 2", saturates),
        ("--attention sdpa --kernel-c 8 --kernel-tau 2", saturates),
        (
            "--kernel-polynomial-degree 6",
            "kernel.polynomial_degree = 6 (flag --kernel-polynomial-degree): polynomial degree = 6 is \
             out of range: 2 to 5",
        ),
        (
            "--kernel-polynomial-eighths 9",
            "kernel.polynomial_eighths = 9 (flag --kernel-polynomial-eighths): polynomial eighths = 9",
        ),
        ("--kernel-exponential schraudolph", inference),
        (
            "--attention fp4 --kernel-exponential mitchell-p",
            "the mitchell-p exponential is for inference only",
        ),
        (
            "--attention nvfp4 --kernel-profile hopper",
            "attention = nvfp4 (flag --attention) and kernel.profile = hopper (flag \
             --kernel-profile): profile hopper does not go with path nvfp4: Hopper has no 4-bit \
             products; use `block-scaled`",
        ),
        (
            "--kernel-v-fold on",
            "attention = mxfp8 and kernel.v_fold = on (flag --kernel-v-fold): value_scales, v_fold, \
             k_fold or dk_rounding does not go with path mxfp8: they are options of `fp4`",
        ),
        (
            "--kernel-ablate grouped-v",
            "kernel.ablate = grouped-v (flag --kernel-ablate): ablate grouped-v does not go with path \
             mxfp8: it would change nothing there",
        ),
        (
            "--attention sdpa --kernel-ablate unquantised-d",
            "attention = sdpa (flag --attention) and kernel.ablate = unquantised-d",
        ),
        (
            "--model-head-dim 96 --kernel-profile hopper",
            "model.head_dim = 96 (flag --model-head-dim) and kernel.profile = hopper (flag \
             --kernel-profile): head dimension 96 is not supported: use one of [64, 128]",
        ),
        (
            "--kernel-backward one-kernel",
            "attention = mxfp8 and kernel.backward = one-kernel (flag --kernel-backward): backward \
             one-kernel does not go with path mxfp8, profile auto: it is a form of `mxfp8` with profile \
             `hopper`",
        ),
        (
            "--kernel-exact --kernel-profile hopper",
            "kernel.profile = hopper (flag --kernel-profile) and kernel.exact = true",
        ),
        (
            "--kernel-exact --kernel-dq fp32",
            "kernel.exact = true (flag --kernel-exact) and kernel.dq = fp32 (flag --kernel-dq): exact \
             asks for operand_scales token",
        ),
    ] {
        let args: Vec<_> = args.split_whitespace().collect();
        let message = error(load(&args, &[]));
        assert!(message.contains(told), "{args:?}\n{message}\n{told}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn names_of_numerics_are_the_kernels_own() {
    for (flag, near, expected) in [
        ("--kernel-operand-scales", "tokens", "auto, block, token"),
        ("--kernel-ds-exponent", "rows", "auto, square, row"),
        (
            "--kernel-dq",
            "fp16_causal",
            "auto, fp16, fp16-causal, fp32",
        ),
        ("--kernel-backward", "one", "auto, two-kernel, one-kernel"),
        (
            "--kernel-exponential",
            "poly",
            "exact, polynomial, mitchell-p, schraudolph",
        ),
        ("--kernel-value-scales", "all", "diagonal, everywhere"),
        ("--kernel-v-fold", "true", "auto, on, off"),
        ("--kernel-k-fold", "yes", "auto, on, off"),
        (
            "--kernel-dk-rounding",
            "random",
            "auto, nearest, stochastic",
        ),
        (
            "--kernel-ablate",
            "d",
            "none, tiling, unquantised-d, output-d, p4-forward, exp-forward, floor-exponents, \
             per-tensor, grouped-v, unclamped-polynomial, saturate",
        ),
    ] {
        let key = flag.replace("--kernel-", "kernel.").replace('-', "_");
        assert_eq!(
            error(load(&[flag, near], &[])),
            format!("flag {flag}: {key} must be one of {expected}, found {near:?}"),
        );
    }
    let flag = error(load(&["--kernel-ds-exponents", "row"], &[]));
    assert!(flag.contains("'--kernel-ds-exponent'"), "{flag}");
    let file = Toml::new("[kernel]\nds_exp = 'row'");
    let unknown = error(file.load(&[], &[]));
    assert!(
        unknown.contains("kernel.ds_exp; the nearest is kernel.ds_exponent"),
        "{unknown}"
    );
}

fn options(args: &str) -> flamia_kernels::Options {
    let args: Vec<_> = args.split_whitespace().collect();
    let settings = load(&args, &[]).unwrap();
    match settings.attention {
        Attention::Path(path) => settings.kernel.options(path),
        Attention::Sdpa | Attention::Flash => panic!("{args:?}"),
    }
}

#[test]
fn what_is_left_at_auto_follows_the_path_and_exact() {
    use flamia_kernels::{BackwardForm, DkRounding, DqAccumulator, Mask, Options, Path};
    for path in Path::ALL {
        let plain = Options::new(path, Mask::Causal);
        assert_eq!(options(&format!("--attention {path}")), plain);
        assert_eq!(
            options(&format!("--attention {path} --kernel-exact")),
            plain.exact()
        );
    }
    let hopper = "--kernel-profile hopper";
    assert_eq!(options(hopper).backward, BackwardForm::Auto);
    for form in [BackwardForm::TwoKernel, BackwardForm::OneKernel] {
        let named = options(&format!("{hopper} --kernel-backward {form}"));
        assert_eq!(named.backward, form);
    }
    let fp4 = options("--attention fp4");
    assert_eq!(
        (fp4.v_fold, fp4.k_fold, fp4.dk_rounding),
        (true, true, DkRounding::Stochastic)
    );
    let changed = "--attention fp4 --kernel-v-fold off --kernel-k-fold off --kernel-dk-rounding \
        nearest --kernel-dq fp32 --kernel-window 100";
    let expected = Options {
        v_fold: false,
        k_fold: false,
        dk_rounding: DkRounding::Nearest,
        dq: DqAccumulator::Fp32,
        ..Options::new(Path::Fp4, Mask::window(100))
    };
    assert_eq!(options(changed), expected);
}

#[test]
fn every_range_is_checked_at_its_ends() {
    for (flag, refused, taken) in [
        ("--steps", "0", "1"),
        ("--model-dim", "0", "1"),
        ("--model-layers", "0", "1"),
        ("--model-heads", "0", "2"),
        ("--model-kv-heads", "0", "1"),
        ("--model-kv-heads", "3", "2"),
        ("--model-head-dim", "32", "96"),
        ("--model-head-dim", "100", "256"),
        ("--model-ffn-dim", "0", "1"),
        ("--model-rope-theta", "0", "1"),
        ("--model-norm-eps", "0", "1e-9"),
        ("--model-init-std", "-0.1", "1e-9"),
        ("--batch-row-tokens", "1", "2"),
        ("--batch-rows", "0", "1"),
        ("--batch-accumulate", "0", "1"),
        ("--optim-lr", "0", "1e-9"),
        ("--optim-eps", "0", "1e-12"),
        ("--optim-clip", "0", "1e-9"),
        ("--optim-weight-decay", "-1", "0"),
        ("--optim-beta1", "1", "0"),
        ("--optim-beta2", "1", "0.999"),
        ("--optim-min-lr-ratio", "1.01", "1"),
        ("--optim-warmup", "1001", "1000"),
        ("--eval-every", "0", "1"),
        ("--eval-rows", "0", "1"),
        ("--eval-fraction", "0", "0.01"),
        ("--eval-fraction", "1", "0.99"),
        ("--checkpoint-every", "0", "1"),
        ("--checkpoint-keep", "0", "1"),
        ("--guard-skip-limit", "0", "1"),
        ("--guard-spike-window", "7", "8"),
        ("--guard-spike-factor", "0", "0.1"),
        ("--log-every", "0", "1"),
        ("--distributed-lost-after", "0", "0.1"),
        ("--distributed-patience", "-1", "1"),
        ("--distributed-bucket-mib", "0", "1"),
        ("--compute-peak-tflops", "-1", "0"),
        ("--kernel-c", "5", "3"),
        ("--kernel-tau", "-1", "0"),
    ] {
        load(&[flag, taken], &[]).unwrap_or_else(|e| panic!("{flag} {taken}: {e}"));
        match load(&[flag, refused], &[]) {
            Err(SettingsError::Invalid(problems)) => {
                assert_eq!(problems.len(), 1, "{flag} {refused}: {problems:?}");
                let named = problems[0]
                    .fields
                    .iter()
                    .map(|(key, ..)| key.replace(['.', '_'], "-"));
                assert!(
                    named.into_iter().any(|name| flag == format!("--{name}")),
                    "{problems:?}"
                );
            }
            other => panic!("{flag} {refused}: {other:?}"),
        }
    }
}

#[test]
fn all_problems_are_told_at_once() {
    let message = error(load(&["--attention", "flash", "--kernel-window", "9"], &[]));
    assert!(
        message.contains("sliding window") && message.contains("sdpa"),
        "{message}"
    );
    let message = error(load(&["--model-dim", "0", "--batch-rows", "0"], &[]));
    assert_eq!(message.lines().count(), 2, "{message}");
}

#[test]
fn settings_survive_a_round_trip_through_toml() {
    // What goes with fp4, with every other setting that is no number format's.
    let fp4: Vec<_> = surface()
        .iter()
        .filter(|row| !["attention", "kernel.profile", "preset"].contains(&row[0]))
        .flat_map(|row| [row[1], row[4]])
        .chain(["--attention", "fp4"])
        .collect();
    for args in [&fp4[..], &["--kernel-profile", "hopper"], &[]] {
        let original = load(args, &[]).unwrap();
        let copy = Toml::new(&original.to_toml().unwrap())
            .load(&[], &[])
            .unwrap();
        assert_eq!(without_origins(copy), without_origins(original));
    }
}

#[test]
fn the_listing_shows_every_value_and_where_it_came_from() {
    let text = load(&["--steps", "400"], &[("FLAMIA_OPTIM_LR", "1e-3")])
        .unwrap()
        .describe();
    let line = |start: &str| {
        let found = text
            .lines()
            .find(|line| line.trim_start().starts_with(start));
        found.unwrap_or_else(|| panic!("no {start:?} in\n{text}"))
    };
    assert!(line("steps ").ends_with("400  (flag --steps)"));
    assert!(line("lr ").ends_with("0.001  (environment FLAMIA_OPTIM_LR)"));
    assert!(line("tokenizer ").ends_with("bytes"));
    assert!(line("attention ").ends_with("mxfp8"));
    let groups = text.lines().filter(|line| !line.starts_with(' ')).count();
    assert_eq!(text.lines().count(), keys().len() + groups);
    assert_eq!(groups, 11);
}

#[test]
fn help_teaches_every_setting() {
    let help = match load(&["--help"], &[]) {
        Err(SettingsError::Usage(help)) => help,
        other => panic!("{other:?}"),
    };
    assert_eq!(help.exit_code(), 0);
    let help = help.to_string();
    for key in keys() {
        assert!(help.contains(&format!("--{} ", key.flag)), "{}", key.flag);
        assert!(
            help.contains(&format!("in TOML: {}\n", key.path)),
            "{}",
            key.path
        );
        assert!(
            help.contains(&format!("as env:  {}\n", key.variable)),
            "{}",
            key.variable
        );
        assert!(key.help[0].ends_with('.'), "{}: {:?}", key.path, key.help);
    }
    for group in [
        "Run",
        "Model",
        "Batch",
        "Optimiser (AdamW)",
        "Attention numerics",
        "Evaluation",
        "Several processes",
    ] {
        assert!(help.contains(&format!("\n{group}:\n")), "{group}\n{help}");
    }
    assert!(help.contains("Usage: cargo xtask train"), "{help}");
    assert!(help.contains("cargo xtask train --resume --out runs/long"));
}

#[test]
fn the_number_of_ranks_is_for_who_starts_them() {
    let words = |line: &str| {
        line.split_whitespace()
            .map(OsString::from)
            .collect::<Vec<_>>()
    };
    for (line, ranks, rest) in [
        ("", 1, ""),
        ("--steps 3", 1, "--steps 3"),
        ("--nproc 2", 2, ""),
        ("--steps 3 --nproc 4 --resume", 4, "--steps 3 --resume"),
        ("--nproc=8 --steps=3", 8, "--steps=3"),
    ] {
        let (found, left) = split_nproc(&words(line)).unwrap();
        assert_eq!((found, left), (ranks, words(rest)), "{line}");
    }
    for line in [
        "--nproc 0",
        "--nproc x",
        "--nproc",
        "--nproc 1 --nproc 1",
        "--stps 3",
    ] {
        let refused = split_nproc(&words(line));
        assert!(matches!(refused, Err(SettingsError::Usage(_))), "{line}");
    }
    let message = error(load(&["--nproc", "2"], &[]));
    assert!(message.contains("cargo xtask train"), "{message}");
}

#[test]
fn clap_accepts_the_command_as_built() {
    command().debug_assert();
}

#[test]
fn usage_errors_and_the_version_have_their_exit_codes() {
    for (args, code) in [(["--version"], 0), (["--nonsense"], 2), (["stray"], 2)] {
        match load(&args, &[]) {
            Err(SettingsError::Usage(usage)) => assert_eq!(usage.exit_code(), code, "{args:?}"),
            other => panic!("{args:?}: {other:?}"),
        }
    }
    assert!(load(&["--resume"], &[]).unwrap().resume);
    assert!(
        !load(&["--resume", "false"], &[("FLAMIA_RESUME", "true")])
            .unwrap()
            .resume
    );
}
