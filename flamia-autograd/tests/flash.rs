//! FlashAttention 2 in the graph gives what torch's own attention of each document does.
//! `cargo test -p flamia-autograd --test flash -- --ignored` on a machine with an NVIDIA GPU.

mod common;

use common::cosine;
use flamia_autograd::{FlashDocuments, flash_attention, load_cuda};
use flamia_sched::Documents;
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

/// Exact attention in FP32, one document after another.
fn exact(q: &Tensor, k: &Tensor, v: &Tensor, lengths: &[i64]) -> Tensor {
    let group = q.size()[1] / k.size()[1];
    let mut start = 0;
    let documents: Vec<_> = lengths
        .iter()
        .map(|&len| {
            let part = |x: &Tensor| x.narrow(0, start, len).transpose(0, 1);
            let all = |x: &Tensor| part(x).repeat_interleave_self_int(group, 0, None);
            let hidden = Tensor::ones([len, len], (Kind::Bool, GPU)).triu(1);
            let scores = part(q).matmul(&all(k).transpose(1, 2)) / (q.size()[2] as f64).sqrt();
            let p = scores
                .masked_fill(&hidden, f64::NEG_INFINITY)
                .softmax(-1, Kind::Float);
            let o = p.matmul(&all(v)).transpose(0, 1);
            start += len;
            o
        })
        .collect();
    Tensor::cat(&documents, 0)
}

#[test]
#[ignore = "needs a GPU"]
fn outputs_and_gradients_are_those_of_exact_attention() {
    assert_eq!(load_cuda(), Ok(true));
    tch::manual_seed(1);
    let lengths = [200, 0, 1, 131, 52];
    let documents = Documents::from_lengths(&lengths.map(|len| len as usize)).unwrap();
    let documents = FlashDocuments::new(&documents, GPU).unwrap();
    for (kind, kv_heads, head_dim) in [
        (Kind::BFloat16, 4, 128),
        (Kind::BFloat16, 2, 64),
        (Kind::Float, 1, 128),
    ] {
        // Values that BF16 holds; K and V lie in one tensor, so that V has strides of its own.
        let draw = |heads| {
            Tensor::randn([384, heads, head_dim], (Kind::BFloat16, GPU))
                .to_kind(kind)
                .set_requires_grad(true)
        };
        let (q, kv) = (draw(4), draw(2 * kv_heads));
        let d_o = draw(4).detach();
        let run = |attend: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor, kind| {
            let [q, kv] = [&q, &kv].map(|x| x.detach().to_kind(kind).set_requires_grad(true));
            let halves = kv.split(kv_heads, 1);
            let o = attend(&q, &halves[0], &halves[1]);
            assert_eq!((o.kind(), o.size()), (kind, q.size()));
            (&o * d_o.to_kind(kind)).sum(Kind::Float).backward();
            [o.detach(), q.grad(), kv.grad()]
        };
        let found = run(
            &|q, k, v| flash_attention(q, k, v, &documents).unwrap(),
            kind,
        );
        let wanted = run(&|q, k, v| exact(q, k, v, &lengths), Kind::Float);
        for ((found, wanted), name) in found.iter().zip(&wanted).zip(["o", "dq", "dkv"]) {
            let cosine = cosine(found, wanted);
            assert!(cosine > 0.9999, "{kind:?}, {kv_heads}, {name}: {cosine}");
        }
    }
}
