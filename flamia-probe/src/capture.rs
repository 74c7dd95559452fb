//! Activations captured from a training run.
//!
//! A capture is a safetensors file that holds, for each layer `N` from 0, `layerN.q` and
//! `layerN.d_o` `[rows, heads, head_dim]`, `layerN.k` and `layerN.v` `[rows, kv_heads, head_dim]`, all
//! as attention got them, in BF16 or F32, and one `cu_seqlens` (I32 or I64): where each document of
//! the packed row starts, and the number of rows.

use std::path::Path;

use flamia_sched::Documents;
use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::ProbeError;
use crate::problem::Problem;

/// The problem of every layer in the capture at `path`, in order.
///
/// # Errors
/// [`ProbeError::Capture`] says what is missing or does not fit.
pub fn read(path: &Path) -> Result<Vec<Problem>, ProbeError> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string());
    bytes
        .and_then(|bytes| parse(&bytes))
        .map_err(|reason| ProbeError::Capture {
            path: path.into(),
            reason,
        })
}

fn parse(bytes: &[u8]) -> Result<Vec<Problem>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let boundaries = integers(&tensor(&file, "cu_seqlens")?)?;
    let layers = (0..)
        .take_while(|layer| file.tensor(&format!("layer{layer}.q")).is_ok())
        .map(|layer| problem(&file, layer, &boundaries))
        .collect::<Result<Vec<_>, _>>()?;
    if layers.is_empty() {
        return Err("it holds no `layer0.q`: write it with `cargo xtask probe capture`".into());
    }
    Ok(layers)
}

fn problem(file: &SafeTensors, layer: usize, boundaries: &[i64]) -> Result<Problem, String> {
    let part = |name: &str, expected: Option<[usize; 3]>| {
        let name = format!("layer{layer}.{name}");
        let tensor = tensor(file, &name)?;
        let shape: [usize; 3] = tensor
            .shape()
            .try_into()
            .map_err(|_| format!("`{name}` has shape {:?}, not 3 dimensions", tensor.shape()))?;
        match expected {
            Some(expected) if shape != expected => Err(format!(
                "`{name}` has shape {shape:?}, expected {expected:?}"
            )),
            _ => Ok((shape, floats(&tensor)?)),
        }
    };
    let (shape, q) = part("q", None)?;
    let [rows, heads, head_dim] = shape;
    let ([k_rows, kv_heads, k_dim], k) = part("k", None)?;
    if (k_rows, k_dim) != (rows, head_dim) {
        return Err(format!(
            "`layer{layer}.k` has shape {:?}, expected {:?}",
            [k_rows, kv_heads, k_dim],
            [rows, kv_heads, head_dim]
        ));
    }
    let (_, v) = part("v", Some([rows, kv_heads, head_dim]))?;
    let (_, d_o) = part("d_o", Some(shape))?;
    let documents = Documents::from_cu_seqlens(boundaries, rows).map_err(|e| e.to_string())?;
    Ok(Problem {
        documents,
        heads,
        kv_heads,
        head_dim,
        q,
        k,
        v,
        d_o,
    })
}

fn tensor<'a>(file: &SafeTensors<'a>, name: &str) -> Result<TensorView<'a>, String> {
    file.tensor(name)
        .map_err(|_| format!("it holds no `{name}`: write it with `cargo xtask probe capture`"))
}

fn floats(tensor: &TensorView) -> Result<Vec<f32>, String> {
    match tensor.dtype() {
        Dtype::F32 => Ok(elements(tensor, f32::from_le_bytes)),
        Dtype::BF16 => Ok(elements(tensor, |b| bf16::from_le_bytes(b).to_f32())),
        other => Err(format!("elements are {other:?}, expected BF16 or F32")),
    }
}

fn integers(tensor: &TensorView) -> Result<Vec<i64>, String> {
    match tensor.dtype() {
        Dtype::I64 => Ok(elements(tensor, i64::from_le_bytes)),
        Dtype::I32 => Ok(elements(tensor, |b| i32::from_le_bytes(b).into())),
        other => Err(format!("`cu_seqlens` is {other:?}, expected I32 or I64")),
    }
}

/// Safetensors files are little-endian everywhere.
fn elements<const N: usize, T>(tensor: &TensorView, read: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (elements, _) = tensor.data().as_chunks::<N>();
    elements.iter().map(|bytes| read(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(parts: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Vec<u8> {
        let views = parts.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.to_vec(), data).unwrap();
            ((*name).to_owned(), view)
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn bf16s(values: &[f32]) -> Vec<u8> {
        let bytes = values.iter().map(|x| bf16::from_f32(*x).to_le_bytes());
        bytes.flatten().collect()
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn both_element_types_and_the_documents_are_read() {
        let kv = [1.5, -2.0, 3.0];
        let q = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let boundaries = [0i64, 2, 3];
        let bytes = file(&[
            (
                "cu_seqlens",
                Dtype::I64,
                &[3],
                boundaries.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ),
            ("layer0.q", Dtype::BF16, &[3, 2, 1], bf16s(&q)),
            ("layer0.k", Dtype::BF16, &[3, 1, 1], bf16s(&kv)),
            ("layer0.v", Dtype::F32, &[3, 1, 1], f32s(&[0.1, 0.2, 0.3])),
            ("layer0.d_o", Dtype::F32, &[3, 2, 1], f32s(&q)),
        ]);
        let [layer] = parse(&bytes).unwrap().try_into().unwrap();
        assert_eq!(layer.documents.cu_seqlens(), [0, 2, 3]);
        assert_eq!((layer.heads, layer.kv_heads, layer.head_dim), (2, 1, 1));
        assert_eq!((layer.q.as_slice(), layer.k.as_slice()), (&q[..], &kv[..]));
        assert_eq!(layer.v, [0.1, 0.2, 0.3]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let cu_seqlens = ("cu_seqlens", Dtype::I32, &[2usize][..], {
            [0i32, 2].iter().flat_map(|x| x.to_le_bytes()).collect()
        });
        let two = |name| (name, Dtype::F32, &[2usize, 1, 1][..], f32s(&[1.0, 2.0]));
        let [q, k, v, d_o] = ["layer0.q", "layer0.k", "layer0.v", "layer0.d_o"].map(two);
        let reason = |parts: &[_]| parse(&file(parts)).unwrap_err();

        let whole = [
            cu_seqlens.clone(),
            q.clone(),
            k.clone(),
            v.clone(),
            d_o.clone(),
        ];
        assert_eq!(parse(&file(&whole)).unwrap().len(), 1);
        assert!(reason(std::slice::from_ref(&q)).contains("cu_seqlens"));
        assert!(reason(std::slice::from_ref(&cu_seqlens)).contains("layer0.q"));
        assert!(reason(&whole[..4]).contains("layer0.d_o"));
        let long = ("layer0.k", Dtype::F32, &[3usize, 1, 1][..], f32s(&[1.0; 3]));
        let found = reason(&[cu_seqlens.clone(), q.clone(), long, v.clone(), d_o.clone()]);
        assert!(
            found.contains("layer0.k") && found.contains("[3, 1, 1]"),
            "{found}"
        );
        let flat = ("layer0.k", Dtype::F32, &[2usize][..], f32s(&[1.0; 2]));
        assert!(reason(&[cu_seqlens, q, flat, v, d_o]).contains("3 dimensions"));
        assert!(parse(b"not a file").is_err());
    }
}
