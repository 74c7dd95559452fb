//! Attention of tensors on a GPU against the reference on the host. `cargo test -- --ignored` on a
//! machine with a Hopper GPU.

mod common;

use common::cosine;
use flamia_autograd::{TorchMemory, TorchStream, attention, attention_forward, load_cuda};
use flamia_cuda::{Gpu, GpuError, Graph, Stream};
use flamia_kernels::{Backend, BackwardForm, Mask, Options, Path, Profile};
use flamia_sched::Documents;
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

fn options(mask: Mask) -> Options {
    Options::new(Path::Mxfp8, mask)
}

/// The reference on the host, as the GPU multiplies.
fn on_host(mask: Mask) -> Options {
    Options {
        profile: Profile::Hopper,
        backend: Backend::Host,
        ..options(mask)
    }
}

fn normal(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (Kind::Float, GPU)).to_kind(kind)
}

fn start() {
    assert_eq!(load_cuda(), Ok(true));
    tch::manual_seed(5);
}

#[test]
#[ignore = "needs a GPU"]
fn outputs_and_gradients_match_the_host() {
    start();
    let documents = Documents::from_lengths(&[300, 0, 1, 129, 70]).unwrap();
    for (kind, head_dim, mask, backward) in [
        (Kind::BFloat16, 128, Mask::Causal, BackwardForm::TwoKernel),
        (Kind::Float, 128, Mask::Full, BackwardForm::OneKernel),
        (
            Kind::BFloat16,
            64,
            Mask::window(90),
            BackwardForm::TwoKernel,
        ),
        (Kind::BFloat16, 128, Mask::Causal, BackwardForm::OneKernel),
    ] {
        let leaf = |heads| {
            // Values that BF16 holds, so that both sides read the same.
            normal(&[500, heads, head_dim], Kind::BFloat16)
                .to_kind(kind)
                .set_requires_grad(true)
        };
        let (q, k, v) = (leaf(4), leaf(2), leaf(2));
        let d_o = normal(&[500, 4, head_dim], Kind::BFloat16).to_kind(kind);
        let run = |options: &Options| {
            let inputs = [&q, &k, &v].map(|x| x.detach().set_requires_grad(true));
            let [q, k, v] = &inputs;
            let o = attention(q, k, v, &documents, options, None).unwrap();
            assert_eq!((o.kind(), o.device()), (kind, GPU));
            (&o * &d_o).sum(Kind::Float).f_backward().unwrap();
            let [q, k, v] = inputs.map(|x| x.grad());
            [o.detach(), q, k, v]
        };
        let in_form = |options| Options {
            backward,
            ..options
        };
        let (found, wanted) = (run(&in_form(options(mask))), run(&in_form(on_host(mask))));
        for ((found, wanted), (name, least)) in found.iter().zip(&wanted).zip([
            ("o", 0.99999),
            ("dq", 0.9999),
            ("dk", 0.9999),
            ("dv", 0.9999),
        ]) {
            assert_eq!(found.kind(), kind);
            let similarity = cosine(found, wanted);
            assert!(
                similarity > least,
                "{name} {similarity} {kind:?} {mask} {backward}"
            );
        }
    }
}

/// What form runs shows in dK, whose dS one kernel rounds otherwise.
#[test]
#[ignore = "needs a GPU"]
fn the_form_follows_documents_and_heads_unless_it_is_named() {
    use BackwardForm::{Auto, OneKernel, TwoKernel};

    start();
    for (lengths, kv_heads, by_rule, other) in [
        (&[4096][..], 2, OneKernel, TwoKernel),
        (&[256; 16], 2, TwoKernel, OneKernel),
        (&[4096], 1, OneKernel, TwoKernel),
    ] {
        let documents = Documents::from_lengths(lengths).unwrap();
        let tensor = |heads| normal(&[4096, heads, 64], Kind::BFloat16);
        let (q, k, v, d_o) = (tensor(2), tensor(kv_heads), tensor(kv_heads), tensor(2));
        let dk = |backward| {
            let options = Options {
                backward,
                ..options(Mask::Causal)
            };
            let k = k.detach().set_requires_grad(true);
            let o = attention(&q, &k, &v, &documents, &options, None).unwrap();
            (&o * &d_o).sum(Kind::Float).f_backward().unwrap();
            k.grad()
        };
        assert!(dk(Auto).equal(&dk(by_rule)), "{lengths:?}, {kv_heads} of K");
        assert!(!dk(Auto).equal(&dk(other)), "{lengths:?}, {kv_heads} of K");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn strides_batches_and_layers_do_not_show() {
    start();
    let documents = Documents::batched(3, 130).unwrap();
    let fused = normal(&[3, 130, 8, 128], Kind::BFloat16);
    let heads = |first, count| fused.narrow(2, first, count);
    let (q, k, v) = (heads(0, 4), heads(4, 2), heads(6, 2));
    let run = |q: &Tensor, k: &Tensor, v: &Tensor| {
        attention(q, k, v, &documents, &options(Mask::Causal), None).unwrap()
    };
    let strided = run(&q, &k, &v);
    assert_eq!(strided.size(), [3, 130, 4, 128]);
    let contiguous = run(&q.contiguous(), &k.contiguous(), &v.contiguous());
    assert!(strided.equal(&contiguous));
    // Rows that no wide load can start at are copied.
    let odd = Tensor::cat(&[&q, &q.narrow(3, 0, 1)], 3).narrow(3, 0, 128);
    assert!(run(&odd, &k, &v).equal(&contiguous));
    // The schedule is used again, and made anew for other documents.
    let other = Documents::from_lengths(&[390]).unwrap();
    let longer = attention(&q, &k, &v, &other, &options(Mask::Causal), None).unwrap();
    assert!(!longer.equal(&contiguous));
    assert!(run(&q, &k, &v).equal(&contiguous));
}

#[test]
#[ignore = "needs a GPU"]
fn boundaries_may_stay_on_the_gpu() {
    start();
    let documents = Documents::from_lengths(&[200, 33, 150]).unwrap();
    let (q, k, v) = (
        normal(&[383, 2, 128], Kind::BFloat16),
        normal(&[383, 1, 128], Kind::BFloat16),
        normal(&[383, 1, 128], Kind::BFloat16),
    );
    let mut cu_seqlens = documents.cu_seqlens().to_vec();
    cu_seqlens.resize(9, 383);
    let cu_seqlens = Tensor::from_slice(&cu_seqlens).to_device(GPU);
    let options = options(Mask::Causal);
    let (o, lse) = attention_forward(&q, &k, &v, &cu_seqlens, &options).unwrap();
    assert_eq!((lse.size(), lse.kind()), (vec![2, 383], Kind::Float));
    let wanted = attention(&q, &k, &v, &documents, &options, None).unwrap();
    assert!(o.equal(&wanted));

    let error = attention_forward(&q, &k, &v, &cu_seqlens.to_kind(Kind::Int64), &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("Int64") && error.contains("Int tensor"),
        "{error}"
    );
    let error = attention_forward(&q.to_kind(Kind::Float), &k, &v, &cu_seqlens, &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains("q is Float"), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn what_there_is_no_kernel_for_is_refused_with_a_way_out() {
    start();
    let documents = Documents::single(40).unwrap();
    let x = normal(&[40, 1, 96], Kind::BFloat16);
    let refusal = |options: &Options| {
        attention(&x, &x, &x, &documents, options, None)
            .unwrap_err()
            .to_string()
    };
    let path = refusal(&Options::new(Path::Nvfp4, Mask::Causal));
    assert!(
        path.contains("path `nvfp4`") && path.contains("backend = host"),
        "{path}"
    );
    let head_dim = refusal(&options(Mask::Causal));
    assert!(head_dim.contains("head dimension 96"), "{head_dim}");
    for options in [
        Options::new(Path::Reference, Mask::Causal),
        Options {
            backend: Backend::Host,
            ..Options::new(Path::Nvfp4, Mask::Causal)
        },
    ] {
        let o = attention(&x, &x, &x, &documents, &options, None).unwrap();
        assert_eq!(o.device(), GPU);
    }
    let short = Documents::single(39).unwrap();
    let y = normal(&[40, 1, 128], Kind::BFloat16);
    let error = attention(&y, &y, &y, &short, &options(Mask::Causal), None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("40 rows") && error.contains("39"), "{error}");
}

/// Q, K and V of a row with documents, and a gradient of O.
struct Row {
    documents: Documents,
    inputs: [Tensor; 3],
    d_o: Tensor,
}

impl Row {
    fn new(lengths: &[usize], [heads, kv_heads, head_dim]: [i64; 3]) -> Self {
        let documents = Documents::from_lengths(lengths).unwrap();
        let rows = documents.total() as i64;
        let tensor = |heads| normal(&[rows, heads, head_dim], Kind::BFloat16);
        Self {
            documents,
            inputs: [heads, kv_heads, kv_heads].map(tensor),
            d_o: tensor(heads),
        }
    }

    /// Leaves of a graph of their own.
    fn leaves(&self) -> [Tensor; 3] {
        [0, 1, 2].map(|i| self.inputs[i].detach().set_requires_grad(true))
    }

    fn attend(&self, [q, k, v]: &[Tensor; 3]) -> Tensor {
        let options = Options {
            // The same bits in every run.
            backward: BackwardForm::TwoKernel,
            ..options(Mask::Causal)
        };
        attention(q, k, v, &self.documents, &options, None).unwrap()
    }

    /// O and the gradients of Q, K and V.
    fn step(&self) -> [Tensor; 4] {
        let leaves = self.leaves();
        let o = self.attend(&leaves);
        (&o * &self.d_o).sum(Kind::Float).f_backward().unwrap();
        let [q, k, v] = leaves.map(|x| x.grad());
        [o.detach(), q, k, v]
    }
}

fn same(a: &[Tensor], b: &[Tensor]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.equal(b))
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_accumulate_and_a_kept_graph_gives_them_again() {
    start();
    let row = Row::new(&[200, 1, 0, 333], [6, 2, 128]);
    let [_, once @ ..] = row.step();
    let leaves = row.leaves();
    for _ in 0..2 {
        let o = row.attend(&leaves);
        (&o * &row.d_o).sum(Kind::Float).f_backward().unwrap();
    }
    let [q, k, v] = [0, 1, 2].map(|i| leaves[i].grad());
    let twice = [0, 1, 2].map(|i| &once[i] * 2.0);
    assert!(same(&[q, k, v], &twice));

    let leaves = row.leaves();
    let loss = (&row.attend(&leaves) * &row.d_o).sum(Kind::Float);
    for keep in [true, false] {
        let again = Tensor::run_backward(&[&loss], &leaves, keep, false);
        assert!(same(&again, &once));
    }
}

/// Recomputing activations: a forward pass without a graph, and the same one with it when gradients are
/// asked for.
#[test]
#[ignore = "needs a GPU"]
fn a_recomputed_forward_pass_gives_the_same_bits() {
    start();
    let row = Row::new(&[700, 64, 5], [4, 4, 64]);
    let [o, ..] = row.step();
    let without_graph = tch::no_grad(|| row.attend(&row.leaves()));
    assert!(without_graph.equal(&o));
    let repeated = row.step();
    assert!(same(&row.step(), &repeated), "the same bits on every run");
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_come_in_the_shape_of_the_inputs() {
    start();
    let documents = Documents::batched(3, 130).unwrap();
    let fused = normal(&[3, 130, 8, 128], Kind::BFloat16).set_requires_grad(true);
    let heads = |first, count| fused.narrow(2, first, count);
    let (q, k, v) = (heads(0, 4), heads(4, 2), heads(6, 2));
    let options = options(Mask::Causal);
    let o = attention(&q, &k, &v, &documents, &options, None).unwrap();
    // A gradient that is a view of one number.
    o.sum(Kind::Float).f_backward().unwrap();
    let gradient = fused.grad();
    assert_eq!(gradient.size(), [3, 130, 8, 128]);

    let leaves = [&q, &k, &v].map(|x| x.detach().contiguous().set_requires_grad(true));
    let [q, k, v] = &leaves;
    let o = attention(q, k, v, &documents, &options, None).unwrap();
    (&o * Tensor::ones_like(&o))
        .sum(Kind::Float)
        .f_backward()
        .unwrap();
    let [q, k, v] = leaves.map(|x| x.grad());
    assert!(Tensor::cat(&[q, k, v], 2).equal(&gradient));
}

/// What a call keeps for its backward pass, beside what BF16 flash attention keeps: Q, K, V, O and LSE.
#[test]
#[ignore = "needs a GPU"]
fn codes_are_saved_and_no_operand() {
    start();
    let [heads, kv_heads, head_dim] = [16, 16, 128];
    let row = Row::new(&[4096; 4], [heads, kv_heads, head_dim]);
    drop(row.step());
    let leaves = row.leaves();
    let before = TorchMemory::reset(0).unwrap().now;
    let o = row.attend(&leaves);
    let kept = TorchMemory::of(0).unwrap().now - before;
    let rows = row.documents.total() as u64;
    let operands = 2 * rows * ((heads + 2 * kv_heads) * head_dim) as u64;
    let results = rows * (2 * heads * head_dim + 4 * heads) as u64;
    let flash = operands + results;
    println!(
        "4x4096, 16 heads of 128: {:.1} MiB are kept for the backward pass, of which {:.1} are O and LSE; \
         BF16 flash attention keeps {:.1} MiB",
        kept as f64 / (1 << 20) as f64,
        results as f64 / (1 << 20) as f64,
        flash as f64 / (1 << 20) as f64
    );
    // Torch rounds large allocations up to 2 MiB.
    assert!(kept < operands * 55 / 100 + results + (8 << 20), "{kept}");
    drop(o);
}

/// What a step launches can be captured, and works on what is in the inputs when it is replayed.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_replays_both_passes() {
    start();
    let gpu = Gpu::new(0).unwrap();
    let stream = TorchStream::new(0).unwrap();
    stream
        .run(|| {
            let row = Row::new(&[300, 129, 0, 71], [4, 2, 128]);
            // Kernels are compiled, and torch's allocator has the memory.
            let wanted = row.step();
            for _ in 0..2 {
                drop(row.step());
            }
            let mut results = None;
            // SAFETY: the stream is torch's, and lives as long as the process.
            let raw = unsafe { Stream::from_raw(stream.as_raw()) };
            // SAFETY: the stream captures nothing yet; the row and the results outlive the replays.
            let graph = unsafe {
                Graph::capture(&gpu, raw, |_| {
                    results = Some(row.step());
                    Ok::<_, GpuError>(())
                })
            };
            let (mut graph, results) = (graph.unwrap(), results.unwrap());
            for mut result in results.iter().map(Tensor::shallow_clone) {
                let _ = result.fill_(f64::NAN);
            }
            for _ in 0..3 {
                graph.replay(raw).unwrap();
            }
            gpu.synchronize().unwrap();
            assert!(same(&results, &wanted));
        })
        .unwrap();
}
