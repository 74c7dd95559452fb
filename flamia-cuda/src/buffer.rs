//! Device memory for tests and benchmarks, where simple is worth more than asynchronous.

use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::error::GpuError;
use crate::ffi::handles::MemoryHandle;
use crate::gpu::Gpu;

/// An array on a GPU. Every copy, and the drop, waits for all work that was given to the GPU
/// before, so that streams need no thought; none may happen during a capture on the same thread.
#[derive(Debug)]
pub struct Buffer<T> {
    memory: MemoryHandle,
    len: usize,
    items: PhantomData<T>,
}

impl<T: NoUninit + AnyBitPattern> Buffer<T> {
    /// An array of these values.
    pub fn from_slice(gpu: &Gpu, values: &[T]) -> Result<Self, GpuError> {
        let mut buffer = Self::allocate(gpu, values.len())?;
        buffer.upload(values)?;
        Ok(buffer)
    }

    /// An array of this length, every byte of it as given: 0, or a poison such as 0xff, which is a
    /// NaN in every float format.
    pub fn filled(gpu: &Gpu, len: usize, byte: u8) -> Result<Self, GpuError> {
        let mut buffer = Self::allocate(gpu, len)?;
        buffer.memory.fill(byte)?;
        Ok(buffer)
    }

    fn allocate(gpu: &Gpu, len: usize) -> Result<Self, GpuError> {
        let memory = MemoryHandle::allocate(gpu.context(), len * size_of::<T>())?;
        Ok(Self {
            memory,
            len,
            items: PhantomData,
        })
    }

    /// Its address on the GPU, as a kernel's argument.
    pub fn pointer(&self) -> u64 {
        self.memory.address()
    }

    /// Its length, in values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Replaces its first values.
    ///
    /// # Panics
    /// If there are more than it holds.
    pub fn upload(&mut self, values: &[T]) -> Result<(), GpuError> {
        self.memory.write(bytemuck::cast_slice(values))
    }

    /// Its values.
    pub fn download(&self) -> Result<Vec<T>, GpuError> {
        self.first(self.len)
    }

    /// Its first `count` values.
    ///
    /// # Panics
    /// If it holds fewer.
    pub fn first(&self, count: usize) -> Result<Vec<T>, GpuError> {
        assert!(count <= self.len, "{count} of {} values", self.len);
        let mut values = vec![T::zeroed(); count];
        self.memory.read(bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}
