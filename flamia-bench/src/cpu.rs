//! `bench cpu`: the throughput of each path on this machine's CPU.

use std::time::{Duration, Instant};

use flamia_kernels::cpu::{self, Gradients};
use flamia_kernels::{AttentionError, Mask, Options, Path, TensorView};
use flamia_probe::numerics::Numerics;
use flamia_probe::problem::Problem;
use flamia_probe::progress::Progress;
use flamia_probe::report::version;
use flamia_probe::{ProbeError, Tensor};
use flamia_train::machine::cpu_name;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// Throughput of every path on the CPU, forward and forward with backward
///
/// Runs take turns: all paths once, then all again. The best of each is reported, so that a
/// disturbance of the machine must last to count, and the ratio to `reference`, exact attention in
/// FP32, comes from the same minutes on the same cores.
#[derive(Clone, Debug, clap::Args)]
pub struct Cpu {
    /// Numerics to measure.
    #[command(flatten)]
    pub numerics: Numerics,

    /// Lengths of the one document
    #[arg(long, value_delimiter = ',', default_value = "2048,4096")]
    pub length: Vec<usize>,

    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub heads: usize,

    /// Key/value heads [default: as many as query heads]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,

    /// Features of a head: 64, 96, 128, 256
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_dim: usize,

    /// causal, full, window:KEYS
    #[arg(long, default_value = "causal")]
    pub mask: Mask,

    /// Times that every path runs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Seed of the operands
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// One path at one length, in one direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Precision path.
    pub path: String,
    /// `forward` or `forward+backward`.
    pub pass: &'static str,
    /// `causal`, `full` or `window:KEYS`.
    pub mask: String,
    /// Rows of the packed row.
    pub length: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Seconds of the fastest run.
    pub seconds: f64,
    /// Rows per second.
    pub tokens_per_s: f64,
    /// Multiplications and additions of the visible entries of the products (two forward, five
    /// backward) per second, in 10^9.
    pub gflops: f64,
    /// Seconds as a multiple of those of `reference`; missing if that was not measured.
    pub ratio: Option<f64>,
    /// Runs of which this is the fastest.
    pub rounds: u32,
    /// Threads that worked.
    pub threads: usize,
    /// The processor's name.
    pub cpu: String,
    /// The vector instructions that the products use.
    pub isa: &'static str,
    /// This package's version and commit.
    pub version: String,
}

impl Cpu {
    /// Two rows for each length and path.
    ///
    /// # Errors
    /// Numerics that do not go together, heads that cannot be shared.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        let numerics = self.numerics.all(self.mask, self.head_dim)?;
        let rounds = self.rounds as usize;
        let progress = Progress::new(self.length.len() * numerics.len() * rounds);
        let mut rows = Vec::new();
        for &length in &self.length {
            let call = Call::draw(self, length)?;
            let mut best = vec![Vec::new(); numerics.len()];
            for _ in 0..rounds {
                for (options, best) in numerics.iter().zip(&mut best) {
                    progress.at(format_args!("{} {length}", options.path));
                    let times = call.time(options)?;
                    best.resize(times.len(), Duration::MAX);
                    for (best, time) in best.iter_mut().zip(times) {
                        *best = time.min(*best);
                    }
                    progress.step();
                }
            }
            let reference = numerics
                .iter()
                .position(|options| options.path == Path::Reference)
                .map(|index| best[index].clone());
            for (options, times) in numerics.iter().zip(&best) {
                for (pass, time) in times.iter().enumerate() {
                    let reference = reference.as_ref().map(|times| times[pass].as_secs_f64());
                    let seconds = time.as_secs_f64();
                    let ratio = reference.map(|reference| seconds / reference);
                    rows.push(self.row(&call, options, pass, seconds, ratio));
                }
            }
        }
        Ok(rows)
    }

    fn row(
        &self,
        call: &Call,
        options: &Options,
        pass: usize,
        seconds: f64,
        ratio: Option<f64>,
    ) -> Row {
        let Problem {
            heads,
            kv_heads,
            head_dim,
            ref documents,
            ..
        } = call.problem;
        let products = [2, 7][pass];
        let flops =
            2 * products * documents.visible_pairs(options.mask) * (heads * head_dim) as u64;
        Row {
            path: options.path.to_string(),
            pass: ["forward", "forward+backward"][pass],
            mask: options.mask.to_string(),
            length: documents.total(),
            heads,
            kv_heads,
            head_dim,
            seconds,
            tokens_per_s: documents.total() as f64 / seconds,
            gflops: flops as f64 / seconds / 1e9,
            ratio,
            rounds: self.rounds,
            threads: rayon::current_num_threads(),
            cpu: cpu_name(),
            isa: isa(),
            version: version(),
        }
    }
}

/// The operands of the calls to time, in the element type that models keep them in.
struct Call {
    problem: Problem,
    /// By [`Tensor`].
    operands: [Vec<bf16>; 4],
}

impl Call {
    fn draw(settings: &Cpu, length: usize) -> Result<Self, ProbeError> {
        let shape = [
            settings.heads,
            settings.kv_heads.unwrap_or(settings.heads),
            settings.head_dim,
        ];
        let mut rng = ChaCha8Rng::seed_from_u64(settings.seed);
        let problem = Problem::gaussian(&[length], shape, &mut rng)?;
        let operands = Tensor::ALL.map(|tensor| {
            let values = problem.tensor(tensor).iter();
            values.map(|x| bf16::from_f32(*x)).collect()
        });
        Ok(Self { problem, operands })
    }

    /// The time of the forward pass, and of it and the backward pass if there is one: exponentials for
    /// inference have none.
    fn time(&self, options: &Options) -> Result<Vec<Duration>, AttentionError> {
        let Problem {
            heads,
            head_dim,
            ref documents,
            ..
        } = self.problem;
        let [q, k, v, d_o] = Tensor::ALL.map(|tensor| {
            let data = &self.operands[tensor as usize];
            let heads = self.problem.heads_of(tensor);
            TensorView::packed("operand", data, documents.total(), heads, head_dim)
        });
        let (q, k, v, d_o) = (q?, k?, v?, d_o?);
        let start = Instant::now();
        let forward = cpu::forward(&q, &k, &v, documents, options, None)?;
        let forward_time = start.elapsed();
        let o = TensorView::packed("o", &forward.o, documents.total(), heads, head_dim)?;
        if options.exponential.is_inference_only() {
            return Ok(vec![forward_time]);
        }
        let gradients: Gradients<bf16> =
            cpu::backward(&q, &k, &v, &o, &forward.lse, &d_o, documents, options, None)?;
        let both = start.elapsed();
        std::hint::black_box(&gradients);
        Ok(vec![forward_time, both])
    }
}

/// The widest of the instruction sets that the products are compiled for and this processor has.
fn isa() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let wide = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (fma, wide) {
            (true, true) => return "avx512",
            (true, false) => return "avx2",
            _ => {}
        }
    }
    std::env::consts::ARCH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Cpu {
        Cpu {
            numerics: Numerics {
                paths: vec![Path::Reference, Path::Mxfp8],
                ..Numerics::default()
            },
            length: vec![96],
            heads: 2,
            kv_heads: Some(1),
            head_dim: 64,
            mask: Mask::Causal,
            rounds: 2,
            seed: 0,
        }
    }

    #[test]
    fn rows_have_the_documented_keys_and_agree_with_themselves() {
        let rows = small().rows().unwrap();
        assert_eq!(rows.len(), 4);
        for pair in rows.chunks(2) {
            assert!(pair[0].seconds < pair[1].seconds, "{pair:?}");
        }
        for row in &rows {
            let reference = rows
                .iter()
                .find(|r| r.path == "reference" && r.pass == row.pass);
            let ratio = row.seconds / reference.unwrap().seconds;
            assert_eq!(row.ratio, Some(ratio));
            assert!((row.tokens_per_s * row.seconds - 96.0).abs() < 1e-9);
            // 96 * 97 / 2 visible pairs, 2 heads of 64 features, 2 or 7 products.
            let products = if row.pass == "forward" { 2.0 } else { 7.0 };
            let flops = products * 2.0 * 4656.0 * 128.0;
            assert!((row.gflops * 1e9 * row.seconds / flops - 1.0).abs() < 1e-9);
        }
        let json = serde_json::to_value(&rows[0]).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().collect();
        let expected = [
            "path",
            "pass",
            "mask",
            "length",
            "heads",
            "kv_heads",
            "head_dim",
            "seconds",
            "tokens_per_s",
            "gflops",
            "ratio",
            "rounds",
            "threads",
            "cpu",
            "isa",
            "version",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn without_the_reference_there_is_no_ratio() {
        let mut bench = small();
        bench.numerics.paths.remove(0);
        assert!(bench.rows().unwrap().iter().all(|row| row.ratio.is_none()));
        bench.numerics.exponential = Some(flamia_kernels::Exponential::Schraudolph);
        let rows = bench.rows().unwrap();
        assert_eq!(rows.len(), 1, "there is no backward pass");
        bench.kv_heads = Some(3);
        assert!(bench.rows().is_err());
    }
}
