//! The oracle: the same model in plain f64 loops, one document at a time, without torch.

use std::collections::BTreeMap;

use flamia_train::model::{Model, ModelShape};

pub struct PlainLlama {
    shape: ModelShape,
    pub weights: BTreeMap<String, Vec<f64>>,
}

type Rows = Vec<Vec<f64>>;

impl PlainLlama {
    pub fn of(model: &Model) -> Self {
        let widen = |tensor| super::floats(tensor).into_iter().map(f64::from).collect();
        let weights = model
            .params
            .iter()
            .map(|(name, t)| (name.to_string(), widen(t)))
            .collect();
        Self {
            shape: model.shape.clone(),
            weights,
        }
    }

    pub fn logits(&self, tokens: &[i64]) -> Rows {
        let embedding = &self.weights["model.embed_tokens.weight"];
        let dim = self.shape.dim;
        let mut x: Rows = tokens
            .iter()
            .map(|&token| embedding[token as usize * dim..][..dim].to_vec())
            .collect();
        for layer in 0..self.shape.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let h = self.norm(&x, &name("input_layernorm"));
            add(&mut x, &self.attention(&h, layer));
            let h = self.norm(&x, &name("post_attention_layernorm"));
            let (gate, up) = (
                self.linear(&h, &name("mlp.gate_proj")),
                self.linear(&h, &name("mlp.up_proj")),
            );
            let hidden: Rows = gate
                .iter()
                .zip(&up)
                .map(|(g, u)| {
                    g.iter()
                        .zip(u)
                        .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                        .collect()
                })
                .collect();
            add(&mut x, &self.linear(&hidden, &name("mlp.down_proj")));
        }
        let h = self.norm(&x, "model.norm.weight");
        self.linear(
            &h,
            if self.shape.tied {
                "model.embed_tokens.weight"
            } else {
                "lm_head.weight"
            },
        )
    }

    /// Cross-entropy of each token that has a successor in its document, summed.
    pub fn summed_loss(&self, documents: &[Vec<i64>]) -> f64 {
        documents
            .iter()
            .flat_map(|tokens| {
                let logits = self.logits(tokens);
                let next: Vec<i64> = tokens.iter().skip(1).copied().collect();
                next.into_iter().zip(logits).map(|(next, logits)| {
                    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
                    sum.ln() - logits[next as usize]
                })
            })
            .sum()
    }

    fn attention(&self, h: &Rows, layer: usize) -> Rows {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}.weight");
        let (q, k, v) = (
            self.linear(h, &name("q_proj")),
            self.linear(h, &name("k_proj")),
            self.linear(h, &name("v_proj")),
        );
        let e = self.shape.head_dim;
        let mut out = vec![vec![0.0; self.shape.heads * e]; h.len()];
        for head in 0..self.shape.heads {
            let kv_head = head * self.shape.kv_heads / self.shape.heads;
            let slice = |rows: &Rows, t: usize, head: usize| rows[t][head * e..][..e].to_vec();
            for (t, out) in out.iter_mut().enumerate() {
                let query = self.rotate(slice(&q, t, head), t);
                let weights: Vec<f64> = (0..=t)
                    .map(|s| {
                        let key = self.rotate(slice(&k, s, kv_head), s);
                        (dot(&query, &key) / (e as f64).sqrt()).exp()
                    })
                    .collect();
                let sum: f64 = weights.iter().sum();
                for (s, weight) in weights.iter().enumerate() {
                    for (o, value) in out[head * e..].iter_mut().zip(slice(&v, s, kv_head)) {
                        *o += weight / sum * value;
                    }
                }
            }
        }
        self.linear(&out, &name("o_proj"))
    }

    /// Rotation as complex multiplication: element `i` is the real and `i + e/2` the imaginary part.
    fn rotate(&self, mut x: Vec<f64>, position: usize) -> Vec<f64> {
        let half = x.len() / 2;
        for i in 0..half {
            let wavelength = self.shape.rope_theta.powf(i as f64 / half as f64);
            let (sin, cos) = (position as f64 / wavelength).sin_cos();
            (x[i], x[i + half]) = (
                x[i] * cos - x[i + half] * sin,
                x[i] * sin + x[i + half] * cos,
            );
        }
        x
    }

    fn norm(&self, x: &Rows, name: &str) -> Rows {
        let gain = &self.weights[name];
        x.iter()
            .map(|row| {
                let mean_square = dot(row, row) / row.len() as f64;
                let scale = 1.0 / (mean_square + self.shape.norm_eps).sqrt();
                row.iter()
                    .zip(gain)
                    .map(|(x, gain)| x * scale * gain)
                    .collect()
            })
            .collect()
    }

    fn linear(&self, x: &Rows, name: &str) -> Rows {
        let weight = &self.weights[name];
        x.iter()
            .map(|row| {
                weight
                    .chunks_exact(row.len())
                    .map(|out| dot(out, row))
                    .collect()
            })
            .collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y;
    }
}
