//! Whether outputs are right, before they are timed.

use std::ops::Range;

use flamia_kernels::cpu::{self, Forward};
use flamia_kernels::{MmaAccumulator, Options, TensorView};
use flamia_probe::metric::cosine;
use flamia_sched::Documents;
use serde::Serialize;
use tch::{Kind, Tensor};

use super::contestant::Contestant;
use super::error::GpuBenchError;
use super::flamia::{Flamia, NAME};
use super::libtorch::Libtorch;
use super::operands::Operands;
use crate::attention::row::Masking;
use crate::attention::sample::sample;
use crate::attention::way::Way;
use crate::attention::workload::Shape;

/// What our output has to be to that of the CPU with the same numerics.
const SAME_NUMERICS: f64 = 0.99999;
/// What it has to be to that from the same codes with other accumulators, which cost 1e-5.
const SAME_CODES: f64 = 0.9999;
/// What exact attention has to be to 8-bit attention, on standard normal operands.
const OTHER_PRECISION: f64 = 0.995;
/// What dQ and dK have to be to those of another form of the backward pass, which rounds dS otherwise.
const OTHER_FORM: f64 = 0.999;
/// What BF16 attentions have to be to each other.
const SAME_PRECISION: f64 = 0.9995;

/// One comparison, and a line of the JSON of `--check`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Name of the packed row or batch.
    pub workload: &'static str,
    /// `causal` or `full`.
    pub mask: Masking,
    /// Whose output.
    pub system: String,
    /// `o`, `lse`, `dq`, `dk` or `dv`.
    pub tensor: &'static str,
    /// Whose output it was compared with.
    pub against: String,
    /// The cosine between them.
    pub cosine: f64,
    /// Elements that were compared.
    pub elements: usize,
}

/// Compares what is right on one workload.
pub struct Checker {
    shape: Shape,
    mask: Masking,
    pub checks: Vec<Check>,
}

impl Checker {
    pub fn new(shape: Shape, mask: Masking) -> Self {
        Self {
            shape,
            mask,
            checks: Vec::new(),
        }
    }

    pub fn mask(&self) -> Masking {
        self.mask
    }

    fn compare(
        &mut self,
        [system, against]: [&str; 2],
        tensor: &'static str,
        (cosine, elements): (f64, usize),
        wanted: f64,
    ) -> Result<(), GpuBenchError> {
        let Self { shape, mask, .. } = *self;
        if cosine.is_nan() || cosine < wanted {
            return Err(GpuBenchError::Wrong {
                system: system.to_owned(),
                workload: shape.name,
                mask,
                tensor,
                against: against.to_owned(),
                cosine,
                wanted,
            });
        }
        self.checks.push(Check {
            workload: shape.name,
            mask,
            system: system.to_owned(),
            tensor,
            against: against.to_owned(),
            cosine,
            elements,
        });
        Ok(())
    }

    /// Output and log-sum-exp of the last head with those of the CPU: on long documents with plain
    /// accumulators, and with those of the hardware, which take the CPU a hundred times as long, on what
    /// of the row there is time for.
    pub fn with_cpu(
        &mut self,
        operands: &Operands,
        flamia: &Flamia<'_>,
    ) -> Result<(), GpuBenchError> {
        let mut options = Way::default().options(self.mask);
        for (accumulator, pairs, against, wanted) in [
            (
                MmaAccumulator::Fp32,
                1 << 30,
                "the CPU, FP32 sums",
                SAME_CODES,
            ),
            (MmaAccumulator::Hopper, 1 << 24, "the CPU", SAME_NUMERICS),
        ] {
            options.accumulator = accumulator;
            let pieces = sample(&operands.documents, self.mask, pairs);
            if pieces.is_empty() {
                continue;
            }
            let found = head(operands, &flamia.o, &flamia.lse, &pieces)?;
            let expected = found.on_cpu(operands.shape.head_dim, &options)?;
            for (tensor, found, expected) in [
                ("o", &found.o, &expected.o),
                ("lse", &found.lse, &expected.lse),
            ] {
                let found = (cosine(found, expected), found.len());
                self.compare([NAME, against], tensor, found, wanted)?;
            }
        }
        Ok(())
    }

    /// Our own results, made in another way, with ours.
    pub fn with_own(&mut self, other: &Flamia<'_>, ours: &Flamia<'_>) -> Result<(), GpuBenchError> {
        let (name, own) = (other.system().name, ours.system().name);
        let [dq, dk, dv] = &ours.gradients;
        let [other_dq, other_dk, other_dv] = &other.gradients;
        let dk_least = match other.is_of_form(ours) {
            true => SAME_NUMERICS,
            false => OTHER_FORM,
        };
        for (tensor, found, wanted, least) in [
            ("o", &other.o, &ours.o, SAME_NUMERICS),
            ("dk", other_dk, dk, dk_least),
            ("dv", other_dv, dv, SAME_NUMERICS),
            ("dq", other_dq, dq, OTHER_FORM),
        ] {
            self.compare([&name, &own], tensor, between(found, wanted)?, least)?;
        }
        Ok(())
    }

    /// A peer's output and gradients with ours, and with the first peer's.
    pub fn with_others(
        &mut self,
        peer: &Libtorch<'_>,
        flamia: &[Flamia<'_>],
        first: Option<&Libtorch<'_>>,
    ) -> Result<(), GpuBenchError> {
        let name = peer.system().name;
        for flamia in flamia {
            let ours = flamia.system().name;
            let found = between(&peer.forward.o, &flamia.o)?;
            self.compare([&name, &ours], "o", found, OTHER_PRECISION)?;
            let Some(gradients) = &peer.gradients else {
                continue;
            };
            let [dq, dk, dv] = &flamia.gradients;
            for (tensor, theirs, ours_here) in [
                ("dq", &gradients.dq, dq),
                ("dk", &gradients.dk, dk),
                ("dv", &gradients.dv, dv),
            ] {
                let theirs = of_heads(theirs, ours_here.size3()?)?;
                let found = between(&theirs, ours_here)?;
                self.compare([&name, &ours], tensor, found, OTHER_PRECISION)?;
            }
        }
        let Some(first) = first else {
            return Ok(());
        };
        let first_name = first.system().name;
        let names = [name.as_str(), first_name.as_str()];
        let found = between(&peer.forward.o, &first.forward.o)?;
        self.compare(names, "o", found, SAME_PRECISION)?;
        if let (Some(a), Some(b)) = (&peer.gradients, &first.gradients) {
            for (tensor, a, b) in [
                ("dq", &a.dq, &b.dq),
                ("dk", &a.dk, &b.dk),
                ("dv", &a.dv, &b.dv),
            ] {
                self.compare(names, tensor, between(a, b)?, SAME_PRECISION)?;
            }
        }
        Ok(())
    }
}

/// Operands and results of one head on some rows, `[rows, head_dim]` and `[rows]`.
struct Head {
    documents: Documents,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    o: Vec<f64>,
    lse: Vec<f64>,
}

/// The last head.
fn head(
    operands: &Operands,
    o: &Tensor,
    lse: &Tensor,
    pieces: &[Range<usize>],
) -> Result<Head, GpuBenchError> {
    let lengths: Vec<_> = pieces.iter().map(Range::len).collect();
    let of = |x: &Tensor| rows(&x.f_select(1, -1)?, pieces);
    Ok(Head {
        documents: Documents::from_lengths(&lengths)?,
        q: of(&operands.q)?,
        k: of(&operands.k)?,
        v: of(&operands.v)?,
        o: of(o)?,
        lse: rows(&lse.f_select(0, -1)?, pieces)?,
    })
}

impl Head {
    fn on_cpu(&self, head_dim: usize, options: &Options) -> Result<Forward<f64>, GpuBenchError> {
        let rows = self.documents.total();
        let view = |name, x| TensorView::packed(name, x, rows, 1, head_dim);
        let (q, k, v) = (
            view("q", &self.q)?,
            view("k", &self.k)?,
            view("v", &self.v)?,
        );
        Ok(cpu::forward(&q, &k, &v, &self.documents, options, None)?)
    }
}

/// The elements of these rows, on the CPU.
fn rows(tensor: &Tensor, pieces: &[Range<usize>]) -> Result<Vec<f64>, GpuBenchError> {
    let mut values = Vec::new();
    for piece in pieces {
        let part = tensor.f_narrow(0, piece.start as i64, piece.len() as i64)?;
        let part = part
            .f_to_device(tch::Device::Cpu)?
            .f_to_kind(Kind::Double)?
            .f_contiguous()?
            .f_view(-1)?;
        values.extend(Vec::<f64>::try_from(&part)?);
    }
    Ok(values)
}

/// Gradients `[rows, heads, head_dim]` of repeated heads as those of the heads that were repeated.
fn of_heads(
    gradient: &Tensor,
    (rows, heads, head_dim): (i64, i64, i64),
) -> Result<Tensor, GpuBenchError> {
    let groups = gradient.f_reshape([rows, heads, -1, head_dim])?;
    Ok(groups.f_sum_dim_intlist(2, false, Kind::Float)?)
}

/// The cosine of two tensors where they are, and how many elements each has.
fn between(a: &Tensor, b: &Tensor) -> Result<(f64, usize), GpuBenchError> {
    let dot = |a: &Tensor, b: &Tensor| -> Result<f64, GpuBenchError> {
        let product = a
            .f_to_kind(Kind::Float)?
            .f_mul(&b.f_to_kind(Kind::Float)?)?;
        Ok(f64::try_from(&product.f_sum(Kind::Double)?)?)
    };
    let cosine = dot(a, b)? / (dot(a, a)? * dot(b, b)?).sqrt();
    Ok((cosine, a.numel()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_of_a_head_are_picked() {
        // Rows of 2 heads of 2 features, counted up.
        let x = Tensor::arange(20, (Kind::Float, tch::Device::Cpu)).view([5, 2, 2]);
        let head = rows(&x.select(1, -1), &[1..2, 3..5]).unwrap();
        assert_eq!(head, [6.0, 7.0, 14.0, 15.0, 18.0, 19.0]);
    }

    #[test]
    fn a_wrong_output_is_refused_with_its_numbers() {
        let mut checker = Checker::new(Shape::named("4x4096").unwrap(), Masking::Full);
        let x = Tensor::from_slice(&[3.0f32, 0.0]);
        let y = Tensor::from_slice(&[3.0f32, 4.0]);
        checker
            .compare(["a", "b"], "o", between(&x, &x).unwrap(), 0.99999)
            .unwrap();
        assert_eq!((checker.checks.len(), checker.checks[0].cosine), (1, 1.0));
        let error = checker
            .compare(["a", "b"], "o", between(&x, &y).unwrap(), 0.9)
            .unwrap_err()
            .to_string();
        for told in [
            "a is wrong on 4x4096, full",
            "o",
            "of b is 0.6000000",
            "0.9 or more",
        ] {
            assert!(error.contains(told), "{told} in {error}");
        }
        let nan = Tensor::from_slice(&[f32::NAN, 0.0]);
        let found = between(&x, &nan).unwrap();
        assert!(checker.compare(["a", "b"], "o", found, 0.0).is_err());
        assert_eq!(checker.checks.len(), 1);
    }
}
