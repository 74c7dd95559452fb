//! Ranks that do collective operations together.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr::{self, NonNull};
use std::time::Duration;

use tch::Tensor;
use torch_sys::C_tensor;

use super::store::{RawStore, first_line, milliseconds};
use super::{DistributedError, Store};
use crate::ffi::take_text;

#[repr(C)]
struct RawGroup {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawWork {
    _opaque: [u8; 0],
}

#[repr(C)]
struct Membership {
    backend: c_int,
    store: *const RawStore,
    name: *const c_char,
    rank: c_int,
    size: c_int,
    timeout_ms: i64,
    device: c_int,
}

unsafe extern "C" {
    safe fn flamia_backend_lacks(backend: c_int) -> *const c_char;
    fn flamia_group_new(membership: *const Membership, group: *mut *mut RawGroup) -> *mut c_char;
    fn flamia_group_free(group: *mut RawGroup);
    fn flamia_all_reduce(
        group: *const RawGroup,
        tensor: *const C_tensor,
        work: *mut *mut RawWork,
    ) -> *mut c_char;
    fn flamia_reduce_scatter(
        group: *const RawGroup,
        output: *const C_tensor,
        input: *const C_tensor,
        work: *mut *mut RawWork,
    ) -> *mut c_char;
    fn flamia_all_gather(
        group: *const RawGroup,
        output: *const C_tensor,
        input: *const C_tensor,
        work: *mut *mut RawWork,
    ) -> *mut c_char;
    fn flamia_broadcast(
        group: *const RawGroup,
        tensor: *const C_tensor,
        root: c_int,
        work: *mut *mut RawWork,
    ) -> *mut c_char;
    fn flamia_barrier(group: *const RawGroup, work: *mut *mut RawWork) -> *mut c_char;
    fn flamia_work_wait(work: *const RawWork) -> *mut c_char;
    fn flamia_work_free(work: *mut RawWork);
}

/// What carries tensors from rank to rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Backend {
    /// TCP, for tensors on the CPU.
    Gloo,
    /// NVIDIA's library, for tensors on GPUs: NVLink, PCIe, InfiniBand.
    Nccl,
}

impl Backend {
    pub(super) fn remedy(self) -> &'static str {
        match self {
            Self::Gloo => {
                "Only torch's packages for Linux have Gloo where it is looked up: install one of them"
            }
            Self::Nccl => {
                "Install the CUDA build of torch 2.11 and call load_cuda first, or train on CPUs"
            }
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gloo => "Gloo",
            Self::Nccl => "NCCL",
        })
    }
}

/// Which one of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// This one, from 0.
    pub rank: usize,
    /// All.
    pub world: usize,
}

/// The ranks that joined a group, seen from one of them. Operations match up by their order, which must
/// be the same on every rank.
///
/// An operation is under way until its [`Work`] has been waited for; until then nobody may write
/// its tensors or read its outputs. On CPUs it is done by threads of the group's own. Dropping a group waits
/// for operations under way, for ever if another rank has gone.
#[derive(Debug)]
pub struct Group {
    raw: NonNull<RawGroup>,
    member: Member,
}

// SAFETY: a process group may be used by any thread, by one at a time: it is not `Sync`.
unsafe impl Send for Group {}

impl Group {
    /// Joins the group `name` of `store`. With Gloo all ranks are connected then. NCCL connects
    /// them in the first operation; this rank's tensors are on the GPU `device` (of no meaning to Gloo).
    ///
    /// An operation that takes longer than `timeout` fails, with NCCL by ending the process.
    ///
    /// # Errors
    /// [`DistributedError::NoBackend`] or [`DistributedError::Join`].
    pub fn join(
        store: &Store,
        name: &str,
        member: Member,
        backend: Backend,
        device: usize,
        timeout: Duration,
    ) -> Result<Self, DistributedError> {
        let Member { rank, world } = member;
        let lacks = flamia_backend_lacks(backend as c_int);
        if !lacks.is_null() {
            // SAFETY: a C string of the shim's that lives as long as the process.
            let symbol = unsafe { CStr::from_ptr(lacks) }.to_string_lossy();
            return Err(DistributedError::NoBackend {
                rank,
                backend,
                symbol: symbol.into_owned(),
            });
        }
        let c_name = store.key(name)?;
        let small = |number: usize| c_int::try_from(number).unwrap_or(c_int::MAX);
        let membership = Membership {
            backend: backend as c_int,
            store: store.as_raw(),
            name: c_name.as_ptr(),
            rank: small(rank),
            size: small(world),
            timeout_ms: milliseconds(timeout),
            device: small(device),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the membership's pointers outlive the call, and the text is ours.
        let refusal = unsafe { take_text(flamia_group_new(&membership, &mut raw)) };
        match (NonNull::new(raw), refusal) {
            (Some(raw), None) => Ok(Self { raw, member }),
            (_, refusal) => Err(DistributedError::Join {
                rank,
                world,
                name: name.into(),
                backend,
                message: first_line(refusal.unwrap_or_default()),
            }),
        }
    }

    /// Who this is.
    pub fn member(&self) -> Member {
        self.member
    }

    /// Replaces `tensor` by its sum over ranks.
    ///
    /// # Errors
    /// [`DistributedError::Collective`], as for all operations.
    pub fn all_reduce(&self, tensor: &Tensor) -> Result<Work, DistributedError> {
        // SAFETY: the group and the tensor live, and torch keeps the tensor.
        self.start("all-reduce", |group, work| unsafe {
            flamia_all_reduce(group, tensor.as_ptr(), work)
        })
    }

    /// Fills `output` with this rank's part of the sum over ranks of `input`, which has as many parts
    /// of its shape as there are ranks. `output` may be that part of `input`, whose other parts are
    /// spoilt then.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn reduce_scatter(
        &self,
        output: &Tensor,
        input: &Tensor,
    ) -> Result<Work, DistributedError> {
        // SAFETY: as in `all_reduce`.
        self.start("reduce-scatter", |group, work| unsafe {
            flamia_reduce_scatter(group, output.as_ptr(), input.as_ptr(), work)
        })
    }

    /// Fills `output` with the ranks' `input`s in order. `input` may be this rank's part of it.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Work, DistributedError> {
        // SAFETY: as in `all_reduce`.
        self.start("all-gather", |group, work| unsafe {
            flamia_all_gather(group, output.as_ptr(), input.as_ptr(), work)
        })
    }

    /// Replaces `tensor` by that of the rank `root`.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work, DistributedError> {
        let root = c_int::try_from(root).unwrap_or(c_int::MAX);
        // SAFETY: as in `all_reduce`.
        self.start("broadcast", |group, work| unsafe {
            flamia_broadcast(group, tensor.as_ptr(), root, work)
        })
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn barrier(&self) -> Result<(), DistributedError> {
        // SAFETY: the group lives.
        self.start("barrier", |group, work| unsafe {
            flamia_barrier(group, work)
        })?
        .wait()
    }

    fn start(
        &self,
        operation: &'static str,
        start: impl FnOnce(*const RawGroup, *mut *mut RawWork) -> *mut c_char,
    ) -> Result<Work, DistributedError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the text is ours.
        let refusal = unsafe { take_text(start(self.raw.as_ptr(), &mut raw)) };
        match (NonNull::new(raw), refusal) {
            (Some(raw), None) => Ok(Work {
                raw,
                member: self.member,
                operation,
            }),
            (_, refusal) => Err(failed(self.member, operation, refusal.unwrap_or_default())),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: the shim made it, and nobody uses it again.
        unsafe { flamia_group_free(self.raw.as_ptr()) };
    }
}

/// A collective operation under way.
#[derive(Debug)]
#[must_use = "the tensors of an operation are not to be touched before it has been waited for"]
pub struct Work {
    raw: NonNull<RawWork>,
    member: Member,
    operation: &'static str,
}

// SAFETY: a work may be waited for on any thread.
unsafe impl Send for Work {}

impl Work {
    /// Waits for the operation. With NCCL it is the current stream that waits, not the host.
    ///
    /// # Errors
    /// [`DistributedError::Collective`] when it failed, or took longer than the group's timeout.
    pub fn wait(self) -> Result<(), DistributedError> {
        // SAFETY: the work lives, and the text is ours.
        match unsafe { take_text(flamia_work_wait(self.raw.as_ptr())) } {
            None => Ok(()),
            Some(message) => Err(failed(self.member, self.operation, message)),
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: the shim made it, and nobody uses it again. torch keeps what is under way.
        unsafe { flamia_work_free(self.raw.as_ptr()) };
    }
}

fn failed(member: Member, operation: &'static str, message: String) -> DistributedError {
    DistributedError::Collective {
        rank: member.rank,
        world: member.world,
        operation,
        message: first_line(message),
    }
}
