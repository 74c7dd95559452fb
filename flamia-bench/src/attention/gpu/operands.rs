//! The operands that all systems attend with.

use flamia_kernels::cuda::call::Kernels;
use flamia_kernels::cuda::tensor::DeviceTensor;
use flamia_sched::Documents;
use tch::{Kind, Tensor};

use super::error::GpuBenchError;
use crate::attention::workload::Shape;

/// Where everything happens. All work is given to one stream, torch's current one throughout.
pub struct Device {
    pub kernels: Kernels,
    pub torch: tch::Device,
    /// torch's number of it.
    pub ordinal: i32,
}

/// Standard normal operands of one workload, BF16, `[rows, heads, head_dim]`.
pub struct Operands {
    pub shape: Shape,
    pub documents: Documents,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
    /// `[documents + 1]`, `i32`.
    pub cu_seqlens: Tensor,
}

impl Operands {
    pub fn draw(device: &Device, shape: Shape) -> Result<Self, GpuBenchError> {
        let documents = shape.documents();
        tch::manual_seed(0);
        let normal = |heads: usize| {
            let size = [documents.total(), heads, shape.head_dim].map(|n| n as i64);
            Tensor::f_randn(size, (Kind::BFloat16, device.torch))
        };
        Ok(Self {
            q: normal(shape.heads)?,
            k: normal(shape.kv_heads)?,
            v: normal(shape.kv_heads)?,
            d_o: normal(shape.heads)?,
            cu_seqlens: Tensor::f_from_slice(documents.cu_seqlens())?.f_to_device(device.torch)?,
            documents,
            shape,
        })
    }

    /// Softmax scale.
    pub fn scale(&self) -> f64 {
        1.0 / (self.shape.head_dim as f64).sqrt()
    }
}

/// Where a tensor lies.
pub fn address(tensor: &Tensor) -> u64 {
    tensor.data_ptr() as u64
}

/// A contiguous tensor `[rows, heads, head_dim]` for a kernel.
pub fn packed(name: &'static str, tensor: &Tensor) -> Result<DeviceTensor, GpuBenchError> {
    let (rows, heads, head_dim) = tensor.size3()?;
    let shape = [rows, heads, head_dim].map(|n| n.unsigned_abs() as usize);
    Ok(DeviceTensor::packed(name, address(tensor), shape))
}
