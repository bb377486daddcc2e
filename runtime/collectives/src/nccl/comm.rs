//! A communicator of the library, and how to abort it while it may be in use.

use super::find::Api;
use super::table::{IN_PROGRESS, NO_COLOR, NcclConfig, NcclResult, RawComm, SUCCESS, UniqueId};
use crate::transport::TransportError;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The time for which an abort waits for calls inside the library.
const CALLS_END: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(50);

/// A communicator. Calls go through [`Comm::enter`], which refuses once the communicator is being
/// ended. Calls are counted, not locked, because an abort must not wait for a lock that a stuck
/// call holds.
pub struct Comm {
    pub api: Arc<Api>,
    /// The library may write it at any time until the ranks have come together, so its memory is
    /// never freed.
    raw: &'static AtomicPtr<c_void>,
    users: AtomicUsize,
    ended: AtomicBool,
}

/// A permit to call the library with a communicator.
pub struct Entered<'a>(&'a Comm);

impl Entered<'_> {
    pub fn raw(&self) -> RawComm {
        self.0.raw.load(Ordering::SeqCst)
    }

    pub fn api(&self) -> &Api {
        &self.0.api
    }

    /// Returns the library's asynchronous state: in progress, done or failed.
    pub fn state(&self) -> Result<NcclResult, TransportError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is live, the pointer valid for a write.
        let code = unsafe { self.api().table.async_error(self.raw(), &mut state) };
        self.check("ncclCommGetAsyncError", code)?;
        match state {
            SUCCESS | IN_PROGRESS => Ok(state),
            failed => Err(self.failure("the communicator", failed)),
        }
    }

    /// Returns whether everything that was begun has been handed to the device.
    pub fn settled(&self) -> Result<bool, TransportError> {
        Ok(self.state()? == SUCCESS)
    }

    /// Checks a return code; a call in progress is no failure.
    pub fn check(&self, function: &'static str, code: NcclResult) -> Result<(), TransportError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            failed => Err(self.failure(function, failed)),
        }
    }

    fn failure(&self, function: &'static str, code: NcclResult) -> TransportError {
        // SAFETY: the communicator is live.
        unsafe { failure(self.api(), self.raw(), function, code) }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns the failure of a call, in the library's words.
///
/// # Safety
/// The communicator is live, or null.
unsafe fn failure(
    api: &Api,
    raw: RawComm,
    function: &'static str,
    code: NcclResult,
) -> TransportError {
    // SAFETY: as the caller promises.
    let message = unsafe { api.table.words(code, raw) };
    TransportError::Call {
        function,
        code,
        message,
    }
}

impl Comm {
    fn new(api: &Arc<Api>) -> Comm {
        Comm {
            api: Arc::clone(api),
            raw: Box::leak(Box::default()),
            users: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Begins to join the other ranks, with the GPU of this thread.
    pub fn begin(
        api: &Arc<Api>,
        id: UniqueId,
        rank: usize,
        ranks: usize,
    ) -> Result<Comm, TransportError> {
        let comm = Comm::new(api);
        let (raw, mut config) = (comm.raw.as_ptr(), NcclConfig::non_blocking());
        // SAFETY: both pointers are valid; the configuration is that of the version in it.
        let code = unsafe {
            api.table
                .init(raw, ranks as c_int, id, rank as c_int, &mut config)
        };
        comm.begun("ncclCommInitRankConfig", code)
    }

    /// Begins to split the communicator; its other ranks call it too. A rank without a colour
    /// gets a null communicator.
    pub fn begin_split(&self, color: Option<u32>, key: usize) -> Result<Comm, TransportError> {
        let entered = self.enter().ok_or(TransportError::Ended)?;
        let new = Comm::new(&self.api);
        let color = color.map_or(NO_COLOR, |color| color as c_int & c_int::MAX);
        // SAFETY: the communicator is live; without a configuration the new one inherits this
        // one's.
        let code = unsafe {
            let none = std::ptr::null_mut();
            let place = new.raw.as_ptr();
            self.api
                .table
                .split(entered.raw(), color, key as c_int, place, none)
        };
        new.begun("ncclCommSplit", code)
    }

    fn begun(self, function: &'static str, code: NcclResult) -> Result<Comm, TransportError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(self),
            failed => {
                // SAFETY: null is allowed.
                Err(unsafe { failure(&self.api, std::ptr::null_mut(), function, failed) })
            }
        }
    }

    pub fn is_null(&self) -> bool {
        self.raw.load(Ordering::SeqCst).is_null()
    }

    /// Returns a permit; `None` once the communicator is being ended.
    pub fn enter(&self) -> Option<Entered<'_>> {
        // Count first, then look at `ended`: in the other order an abort could see no users and
        // free the communicator between the two.
        self.users.fetch_add(1, Ordering::SeqCst);
        let entered = Entered(self);
        (!self.ended.load(Ordering::SeqCst) && !self.is_null()).then_some(entered)
    }

    /// Aborts everything in flight, including kernels that wait for other ranks. It may take any
    /// length of time, so call it on a thread that nobody waits for.
    pub fn abort(&self) {
        if self.ended.swap(true, Ordering::SeqCst) || self.is_null() {
            return;
        }
        if !self.unused_within(CALLS_END) {
            // A call is stuck inside. `ncclCommRevoke` ends it and frees nothing; without it,
            // only the library's abort can end the call.
            if let Some(revoke) = self.api.table.revoke {
                // SAFETY: the communicator is live; 0 is the only flag.
                unsafe { revoke(self.raw.load(Ordering::SeqCst), 0) };
                self.unused_within(CALLS_END);
            }
        }
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::SeqCst);
        // SAFETY: the communicator is live, and ended once.
        unsafe { self.api.table.abort(raw) };
    }

    /// Destroys the communicator in good order; nothing is in flight.
    pub fn close(&self, until: Instant) -> Result<(), TransportError> {
        let finalized = self.finalize(until);
        if self.ended.swap(true, Ordering::SeqCst) || self.is_null() {
            return finalized;
        }
        let mut failed = finalized;
        if !self.unused_within(CALLS_END) {
            failed = failed.and(Err(TransportError::Unclosed {
                unfinished: "a call of another thread has not ended",
            }));
        }
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::SeqCst);
        // SAFETY: the communicator is live, and ended once.
        let code = unsafe {
            match failed {
                Ok(()) => self.api.table.destroy(raw),
                // `ncclCommDestroy` would wait for operations that never end.
                Err(_) => self.api.table.abort(raw),
            }
        };
        match code {
            SUCCESS | IN_PROGRESS => failed,
            code => failed.and(Err(TransportError::Call {
                function: "ncclCommDestroy",
                code,
                message: format!("code {code}"),
            })),
        }
    }

    fn finalize(&self, until: Instant) -> Result<(), TransportError> {
        let Some(entered) = self.enter() else {
            return Ok(());
        };
        // SAFETY: the communicator is live.
        let code = unsafe { self.api.table.finalize(entered.raw()) };
        entered.check("ncclCommFinalize", code)?;
        while !entered.settled()? {
            if Instant::now() > until {
                return Err(TransportError::Unclosed {
                    unfinished: "ncclCommFinalize has not ended in time",
                });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn unused_within(&self, time: Duration) -> bool {
        let start = Instant::now();
        while self.users.load(Ordering::SeqCst) > 0 {
            if start.elapsed() > time {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }
}
