//! MPI as a transport: non-blocking point-to-point messages and nothing else.

use super::abi::Abi;
use super::handle::{MpiHandle, Status};
use super::messages::{joined, messages};
use super::table::{MpiFunctions, MpiStatus, TagBound};
use super::watch::Watchdog;
use crate::transport::{MAX_EAGER_BYTES, MemoryRange, Request, Transport, TransportError};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

/// The tag of eager messages; rendezvous messages use the tags above it.
const EAGER_TAG: c_int = 0;
/// The most bytes of one message where counts are `int`; larger ones are split.
const CHUNK: usize = 1 << 30;
/// The number of rendezvous tags; two ranks never have that many messages in flight.
const MOST_TAGS: u32 = 1 << 20;
/// The time for which closing waits for eager messages to leave.
const CLOSING: Duration = Duration::from_secs(10);

/// The transport of a process under MPI.
pub struct Mpi {
    calls: Box<dyn MpiFunctions>,
    abi: Abi,
    comm: MpiHandle,
    rank: usize,
    size: usize,
    last_tag: u32,
    version: String,
    /// Whether this object has initialized MPI and so finalizes it.
    owner: bool,
    /// The buffer of the next eager message, and its request. MPI owns the buffer until the
    /// request is done.
    message: Box<[u8; MAX_EAGER_BYTES]>,
    awaited: usize,
    /// Eager messages in flight.
    posted: Vec<(Box<[u8]>, usize)>,
    /// Requests of rendezvous messages; those of one message are in the order of its parts.
    rendezvous: HashMap<u64, Vec<usize>>,
    next: u64,
    closed: bool,
}

impl Mpi {
    /// Initializes MPI unless that is done, and duplicates its world communicator.
    pub fn start(
        calls: Box<dyn MpiFunctions>,
        abi: Abi,
        deadline: Duration,
    ) -> Result<Mpi, TransportError> {
        let mut mpi = Mpi {
            calls,
            abi,
            comm: abi.comm_world,
            rank: 0,
            size: 0,
            last_tag: 0,
            version: String::new(),
            owner: false,
            message: Box::new([0; MAX_EAGER_BYTES]),
            awaited: 0,
            posted: Vec::new(),
            rendezvous: HashMap::new(),
            next: 0,
            closed: true,
        };
        // Allowed before initialization, and needed by every error after it.
        mpi.version = version(&*mpi.calls)?;
        mpi.initialize(deadline)?;
        let number = |function: &dyn Fn(*mut c_int) -> c_int| {
            let mut value = 0;
            let code = function(&mut value);
            mpi.check("MPI_Comm_rank or MPI_Comm_size", code)
                .map(|()| value)
        };
        // SAFETY: MPI is initialized; the pointers are to numbers of that size.
        let rank = number(&|value| unsafe { mpi.calls.comm_rank(abi.comm_world, value) })?;
        // SAFETY: as above.
        let size = number(&|value| unsafe { mpi.calls.comm_size(abi.comm_world, value) })?;
        let last_tag = mpi.greatest_tag()?;
        (mpi.rank, mpi.size) = (rank as usize, size as usize);
        // One tag less, because tag 0 belongs to eager messages.
        mpi.last_tag = (last_tag - 1).min(MOST_TAGS);
        mpi.comm = mpi.duplicate(deadline)?;
        // A receive for eager messages is always posted, so that senders never wait for one.
        mpi.await_eager()?;
        mpi.closed = false;
        Ok(mpi)
    }

    fn initialize(&mut self, deadline: Duration) -> Result<(), TransportError> {
        let (mut flag, mut provided) = (0, 0);
        // SAFETY: allowed at any time; the pointer is to an int.
        let code = unsafe { self.calls.initialized(&mut flag) };
        self.check("MPI_Initialized", code)?;
        let wanted = self.abi.thread_serialized;
        // Another library may have initialized MPI; then it also finalizes it.
        self.owner = flag == 0;
        let code = if self.owner {
            // Dropped at the end of the block, which disarms the watchdog.
            let _watched = Watchdog::begin(deadline, &self.version)?;
            // SAFETY: called once, by whoever finds it not called; the pointer is to an int.
            unsafe { self.calls.init_thread(wanted, &mut provided) }
        } else {
            // SAFETY: MPI is initialized.
            unsafe { self.calls.query_thread(&mut provided) }
        };
        self.check("MPI_Init_thread", code)?;
        if provided < wanted {
            return Err(TransportError::OneThread {
                library: self.version.clone(),
                provided,
                wanted,
            });
        }
        // MPI's default handler ends the process on an error; errors must be returned instead.
        let (world, returns) = (self.abi.comm_world, self.abi.errors_return);
        if self.owner {
            // SAFETY: MPI is initialized, and the handles are the library's own.
            let code = unsafe { self.calls.comm_set_errhandler(world, returns) };
            self.check("MPI_Comm_set_errhandler", code)?;
        }
        Ok(())
    }

    fn greatest_tag(&self) -> Result<u32, TransportError> {
        let mut bound: TagBound = std::ptr::null();
        let mut flag = 0;
        let value = (&raw mut bound).cast::<c_void>();
        // SAFETY: the attribute's value is a pointer, and `bound` is one.
        let code = unsafe {
            self.calls
                .comm_get_attr(self.abi.comm_world, self.abi.tag_ub, value, &mut flag)
        };
        self.check("MPI_Comm_get_attr", code)?;
        if flag == 0 || bound.is_null() {
            let library = self.version.clone();
            return Err(TransportError::NoTagLimit { library });
        }
        // SAFETY: MPI keeps the number it points to.
        Ok(unsafe { *bound }.max(2) as u32)
    }

    /// Duplicates the world communicator, because others may use it for messages of their own.
    fn duplicate(&self, deadline: Duration) -> Result<MpiHandle, TransportError> {
        // Leaked on purpose: MPI may still write here after the deadline has passed.
        let cell = Box::leak(Box::new([0usize; 2]));
        let [comm, request] = cell;
        // SAFETY: both places live for the rest of the process.
        let code = unsafe { self.calls.comm_idup(self.abi.comm_world, comm, request) };
        self.check("MPI_Comm_idup", code)?;
        let start = Instant::now();
        // The duplicate completes only when every rank has called it, so this is also the check
        // that all ranks are there.
        while !self.done(request, &mut Status::default())? {
            if start.elapsed() > deadline {
                return Err(TransportError::RanksMissing {
                    ranks: self.size,
                    deadline,
                });
            }
            std::thread::yield_now();
        }
        let comm = MpiHandle(*comm);
        // SAFETY: the communicator is there, and the handler is the library's own.
        let code = unsafe { self.calls.comm_set_errhandler(comm, self.abi.errors_return) };
        self.check("MPI_Comm_set_errhandler", code)?;
        Ok(comm)
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), TransportError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = [0 as c_char; 8192];
        let mut length = 0;
        // SAFETY: the buffer is larger than any library's longest message.
        unsafe {
            self.calls
                .error_string(code, text.as_mut_ptr(), &mut length)
        };
        // SAFETY: the last byte is still zero.
        let words = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
        Err(TransportError::Call {
            function,
            code,
            message: format!("{words} (error {code})"),
        })
    }

    fn done(&self, request: &mut usize, status: &mut Status) -> Result<bool, TransportError> {
        let mut flag = 0;
        // SAFETY: the request is one of this object's, and was not done before.
        let code = unsafe { self.calls.test(request, &mut flag, status) };
        self.check("MPI_Test", code)?;
        Ok(flag != 0)
    }

    fn message(&self, peer: c_int, tag: c_int, bytes: usize) -> MpiStatus {
        MpiStatus {
            bytes,
            kind: self.abi.byte,
            peer,
            tag,
            comm: self.comm,
        }
    }

    fn await_eager(&mut self) -> Result<(), TransportError> {
        let message = self.message(self.abi.any_source, EAGER_TAG, MAX_EAGER_BYTES);
        let buffer = self.message.as_mut_ptr().cast();
        // SAFETY: the buffer is kept until the request is done, or forever: see `drop`.
        let code = unsafe { self.calls.irecv(buffer, message, &mut self.awaited) };
        self.check("MPI_Irecv", code)
    }

    /// Removes eager messages that have left.
    fn sweep(&mut self) -> Result<(), TransportError> {
        let mut index = 0;
        while index < self.posted.len() {
            let mut request = self.posted[index].1;
            if self.done(&mut request, &mut Status::default())? {
                drop(self.posted.swap_remove(index))
            } else {
                self.posted[index].1 = request;
                index += 1;
            }
        }
        Ok(())
    }

    fn chunk(&self) -> usize {
        if self.calls.large() {
            usize::MAX
        } else {
            CHUNK
        }
    }

    /// Begins the MPI messages of a rendezvous message with `begin(address, message)`. Their
    /// number depends on sizes alone, so that both sides match.
    fn rendezvous(
        &mut self,
        peer: usize,
        tag: u32,
        parts: &[MemoryRange],
        begin: impl Fn(&Mpi, *mut c_void, MpiStatus, &mut usize) -> Result<(), TransportError>,
    ) -> Result<Request, TransportError> {
        self.next += 1;
        let id = self.next;
        for message in messages(parts, self.chunk()) {
            let mut request = 0;
            self.begin(peer, tag, &joined(&message), &begin, &mut request)?;
            // The request is kept even after an error, because MPI may touch the memory of parts
            // that were begun.
            self.rendezvous.entry(id).or_default().push(request);
        }
        Ok(Request(id))
    }

    /// Begins one message of separate ranges.
    fn begin(
        &self,
        peer: usize,
        tag: u32,
        parts: &[MemoryRange],
        begin: &impl Fn(&Mpi, *mut c_void, MpiStatus, &mut usize) -> Result<(), TransportError>,
        request: &mut usize,
    ) -> Result<(), TransportError> {
        let address = parts[0].address.cast();
        let mut message = self.message(peer as c_int, tag as c_int + 1, parts[0].bytes);
        if parts.len() == 1 {
            return begin(self, address, message, request);
        }
        let mut kind = self.layout(parts)?;
        (message.bytes, message.kind) = (1, MpiHandle(kind));
        let begun = begin(self, address, message, request);
        // SAFETY: made above; MPI keeps what messages in flight need of it.
        let code = unsafe { self.calls.type_free(&mut kind) };
        begun.and_then(|()| self.check("MPI_Type_free", code))
    }

    /// Returns a datatype of all these ranges, relative to the first address.
    fn layout(&self, parts: &[MemoryRange]) -> Result<usize, TransportError> {
        let origin = parts[0].address.addr();
        // Displacements may be negative: parts need not ascend in memory.
        let place = |part: &MemoryRange| part.address.addr().wrapping_sub(origin) as isize;
        let places: Vec<isize> = parts.iter().map(place).collect();
        let sizes: Vec<usize> = parts.iter().map(|part| part.bytes).collect();
        let mut kind = 0;
        // SAFETY: as many places as sizes.
        let code = unsafe {
            self.calls
                .type_hindexed(&sizes, &places, self.abi.byte, &mut kind)
        };
        self.check("MPI_Type_create_hindexed", code)?;
        // SAFETY: the type was made above.
        let code = unsafe { self.calls.type_commit(&mut kind) };
        self.check("MPI_Type_commit", code)?;
        Ok(kind)
    }
}

/// Returns the first line of the library's own name and version.
pub fn version(calls: &dyn MpiFunctions) -> Result<String, TransportError> {
    let mut text = [0 as c_char; 8192 + 1];
    let mut length = 0;
    // SAFETY: allowed at any time; the buffer has the standard's maximum size.
    let code = unsafe { calls.library_version(text.as_mut_ptr(), &mut length) };
    if code != 0 {
        return Err(without_words("MPI_Get_library_version", code));
    }
    // SAFETY: the last byte is still zero.
    let words = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    let words: Vec<&str> = words.split_whitespace().collect();
    Ok(short(&words.join(" ")))
}

/// Returns the failure of a function that is called while MPI cannot put codes into words.
fn without_words(function: &'static str, code: c_int) -> TransportError {
    TransportError::Call {
        function,
        code,
        message: format!("error {code}"),
    }
}

/// Shortens a version to `Open MPI v4.1.4` or `MPICH Version: 5.0.2`; build details follow in the
/// full text.
fn short(words: &str) -> String {
    let end = words.find([',', ';']).unwrap_or(words.len());
    let end = words.find(" MPICH Release").unwrap_or(end).min(end);
    words[..end].chars().take(80).collect()
}

impl Transport for Mpi {
    fn name(&self) -> String {
        format!("MPI ({})", self.version)
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn last_tag(&self) -> u32 {
        self.last_tag
    }

    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        self.sweep()?;
        let bytes: Box<[u8]> = message.into();
        let message = self.message(to as c_int, EAGER_TAG, bytes.len());
        let mut request = 0;
        // SAFETY: the eager message is kept until the request is done, or forever: see `drop`.
        let code = unsafe {
            self.calls
                .isend(bytes.as_ptr().cast(), message, &mut request)
        };
        self.check("MPI_Isend", code)?;
        self.posted.push((bytes, request));
        Ok(())
    }

    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, TransportError> {
        self.sweep()?;
        let (mut request, mut status) = (self.awaited, Status::default());
        let done = self.done(&mut request, &mut status)?;
        self.awaited = request;
        if !done {
            return Ok(None);
        }
        let mut count = 0;
        // SAFETY: the status is the one that the library has filled.
        let code = unsafe { self.calls.get_count(&status, self.abi.byte, &mut count) };
        self.check("MPI_Get_count", code)?;
        let message = self.message[..(count.max(0) as usize).min(MAX_EAGER_BYTES)].to_vec();
        self.await_eager()?;
        Ok(Some(message))
    }

    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        self.rendezvous(to, tag, parts, |mpi, from, message, request| {
            // SAFETY: the caller keeps the memory until the rendezvous message is finished.
            let code = unsafe { mpi.calls.isend(from, message, request) };
            mpi.check("MPI_Isend", code)
        })
    }

    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        self.rendezvous(from, tag, parts, |mpi, to, message, request| {
            // SAFETY: as in `send`.
            let code = unsafe { mpi.calls.irecv(to, message, request) };
            mpi.check("MPI_Irecv", code)
        })
    }

    fn finished(&mut self, request: Request) -> Result<bool, TransportError> {
        let Some(mut requests) = self.rendezvous.remove(&request.0) else {
            return Ok(true);
        };
        let mut error = None;
        // Tested from the end, so that finished requests can be popped.
        while let (Some(request), None) = (requests.last_mut(), &error) {
            let mut copy = *request;
            match self.done(&mut copy, &mut Status::default()) {
                Ok(true) => drop(requests.pop()),
                Ok(false) => {
                    *request = copy;
                    break;
                }
                Err(failure) => error = Some(failure),
            }
        }
        let finished = requests.is_empty();
        if !finished {
            self.rendezvous.insert(request.0, requests);
        }
        error.map_or(Ok(finished), Err)
    }

    fn gone(&self, _rank: usize) -> Option<&'static str> {
        None
    }

    /// Returns whether nothing is in flight. MPI cannot cancel a send, and may still read or
    /// write memory of messages in flight.
    fn revoke(&mut self) -> bool {
        self.rendezvous.is_empty()
    }

    fn unsent_eager(&mut self) -> usize {
        self.posted.len()
    }

    fn close(&mut self) -> Result<(), TransportError> {
        let until = Instant::now() + CLOSING;
        let late = || Instant::now() > until;
        // Eager messages must leave before MPI is finalized, or receivers would wait for them
        // forever.
        while !self.posted.is_empty() {
            self.sweep()?;
            if late() {
                return Err(TransportError::Unclosed {
                    unfinished: "the last messages did not leave",
                });
            }
        }
        // SAFETY: the request is that of a receive that is not done.
        let code = unsafe { self.calls.cancel(&mut self.awaited) };
        self.check("MPI_Cancel", code)?;
        let mut request = self.awaited;
        while !self.done(&mut request, &mut Status::default())? {
            if late() {
                return Err(TransportError::Unclosed {
                    unfinished: "the last receive was not cancelled",
                });
            }
        }
        self.closed = true;
        if self.owner {
            // SAFETY: nothing is in flight, and this object has initialized MPI.
            let code = unsafe { self.calls.finalize() };
            if code != 0 {
                return Err(without_words("MPI_Finalize", code));
            }
        }
        Ok(())
    }
}

impl Drop for Mpi {
    /// Leaks MPI's buffers unless the transport was closed in good order: MPI may still write
    /// eager messages, and finalizing could wait forever.
    fn drop(&mut self) {
        if !self.closed {
            std::mem::forget(std::mem::replace(
                &mut self.message,
                Box::new([0; MAX_EAGER_BYTES]),
            ));
            std::mem::forget(std::mem::take(&mut self.posted));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_short() {
        for (long, expected) in [
            (
                "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4",
                "Open MPI v4.1.4",
            ),
            (
                "MPICH Version: 5.0.2 MPICH Release date: x",
                "MPICH Version: 5.0.2",
            ),
            (
                "Intel(R) MPI Library 2021.19 for Linux* OS",
                "Intel(R) MPI Library 2021.19 for Linux* OS",
            ),
        ] {
            assert_eq!(short(long), expected);
        }
    }
}
