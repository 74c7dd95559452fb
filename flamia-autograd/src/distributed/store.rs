//! The store where ranks meet: small values by key, served by one process over TCP.

use std::ffi::{CString, c_char};
use std::fmt;
use std::ptr::{self, NonNull};
use std::time::Duration;

use super::DistributedError;
use crate::ffi::{check_torch_version, take_text};

#[repr(C)]
pub(super) struct RawStore {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn flamia_store_new(
        host: *const c_char,
        port: u16,
        is_server: bool,
        timeout_ms: i64,
        store: *mut *mut RawStore,
    ) -> *mut c_char;
    fn flamia_store_free(store: *mut RawStore);
    fn flamia_store_set(
        store: *const RawStore,
        key: *const c_char,
        value: *const u8,
        len: usize,
    ) -> *mut c_char;
    fn flamia_store_get(
        store: *const RawStore,
        key: *const c_char,
        timeout_ms: i64,
        value: *mut *mut u8,
        len: *mut usize,
    ) -> *mut c_char;
    fn flamia_store_has(store: *const RawStore, key: *const c_char, has: *mut bool) -> *mut c_char;
}

/// Where a store is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAddress {
    /// The machine's name or address.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// A connection to a store. One request at a time is under way on it: who waits for a key keeps other
/// threads waiting, so that a thread that must not be kept opens a store of its own.
#[derive(Debug)]
pub struct Store {
    raw: NonNull<RawStore>,
    rank: usize,
    address: StoreAddress,
    /// What all keys begin with.
    prefix: String,
}

// SAFETY: a TCPStore locks each request.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Store {
    /// Opens the store at `address` for `rank`, which also `serves` it to all others for as long as
    /// this value lives. Waits for the server up to `timeout`, which holds for later requests too.
    ///
    /// # Errors
    /// [`DistributedError::Store`] when it cannot be served or reached.
    pub fn open(
        address: StoreAddress,
        rank: usize,
        serves: bool,
        timeout: Duration,
    ) -> Result<Self, DistributedError> {
        check_torch_version()?;
        let host = name("the store's host", &address.host)?;
        let mut raw = ptr::null_mut();
        // SAFETY: a C string and a live local; the text is ours.
        let refusal = unsafe {
            take_text(flamia_store_new(
                host.as_ptr(),
                address.port,
                serves,
                milliseconds(timeout),
                &mut raw,
            ))
        };
        match (NonNull::new(raw), refusal) {
            (Some(raw), None) => Ok(Self {
                raw,
                rank,
                address,
                prefix: String::new(),
            }),
            (_, refusal) => {
                let doing = if serves { "serve" } else { "open" };
                Err(DistributedError::Store {
                    rank,
                    doing: format!("{doing} the store"),
                    address,
                    message: first_line(refusal.unwrap_or_default()),
                })
            }
        }
    }

    /// The same connection, on which all keys and groups are apart from those under other prefixes.
    #[must_use]
    pub fn under(mut self, prefix: &str) -> Self {
        self.prefix = format!("{}{prefix}/", self.prefix);
        self
    }

    /// Where it is served.
    pub fn address(&self) -> &StoreAddress {
        &self.address
    }

    /// Sets `key` to `value`.
    ///
    /// # Errors
    /// [`DistributedError::Store`] when the server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), DistributedError> {
        let c_key = self.key(key)?;
        // SAFETY: the store lives, the value has its length beside it, and the text is ours.
        let refusal = unsafe {
            take_text(flamia_store_set(
                self.raw.as_ptr(),
                c_key.as_ptr(),
                value.as_ptr(),
                value.len(),
            ))
        };
        self.answered("set", key, refusal)
    }

    /// The value of `key`, waited for up to `timeout`.
    ///
    /// # Errors
    /// [`DistributedError::Store`] when nobody sets it in time or the server is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, DistributedError> {
        let c_key = self.key(key)?;
        let (mut value, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the store lives, the pointers are to live locals, and the text is ours.
        let refusal = unsafe {
            take_text(flamia_store_get(
                self.raw.as_ptr(),
                c_key.as_ptr(),
                milliseconds(timeout),
                &mut value,
                &mut len,
            ))
        };
        self.answered("get", key, refusal)?;
        // SAFETY: without a refusal it is from malloc, of that length, and ours.
        unsafe {
            let copy = std::slice::from_raw_parts(value, len).to_vec();
            libc::free(value.cast());
            Ok(copy)
        }
    }

    /// Whether `key` has been set.
    ///
    /// # Errors
    /// [`DistributedError::Store`] when the server is gone.
    pub fn has(&self, key: &str) -> Result<bool, DistributedError> {
        let c_key = self.key(key)?;
        let mut has = false;
        // SAFETY: the store lives, the pointer is to a live local, and the text is ours.
        let refusal = unsafe {
            take_text(flamia_store_has(
                self.raw.as_ptr(),
                c_key.as_ptr(),
                &mut has,
            ))
        };
        self.answered("ask for", key, refusal)?;
        Ok(has)
    }

    /// `key` as the server has it.
    pub(super) fn key(&self, key: &str) -> Result<CString, DistributedError> {
        name("the store's key", &format!("{}{key}", self.prefix))
    }

    pub(super) fn as_raw(&self) -> *const RawStore {
        self.raw.as_ptr()
    }

    fn answered(
        &self,
        doing: &str,
        key: &str,
        refusal: Option<String>,
    ) -> Result<(), DistributedError> {
        match refusal {
            None => Ok(()),
            Some(message) => Err(DistributedError::Store {
                rank: self.rank,
                doing: format!("{doing} {key:?} in the store"),
                address: self.address.clone(),
                message: first_line(message),
            }),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the shim made it, and nobody uses it again; groups have references of their own.
        unsafe { flamia_store_free(self.raw.as_ptr()) };
    }
}

fn name(what: &'static str, name: &str) -> Result<CString, DistributedError> {
    CString::new(name).map_err(|source| DistributedError::Name {
        what,
        name: name.into(),
        source,
    })
}

/// At least one: torch takes none for the default.
pub(super) fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).map_or(i64::MAX, |timeout| timeout.max(1))
}

/// What torch says after it are stack frames.
pub(super) fn first_line(message: String) -> String {
    let line = message.lines().next().unwrap_or_default();
    line.trim_end_matches(['.', ' ']).to_owned()
}
