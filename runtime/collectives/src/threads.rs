//! Ranks that are threads of one process.

use crate::transport::{MemoryRange, Request, Transport};
use crate::{CollectiveError, Communicator};
use moesaic_target::Device;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

/// Runs `body` on `size` ranks, each a thread with a device of its own, and returns what
/// they returned, or what they panicked with. A rank that panics ends the operations of
/// the others.
///
/// # Errors
/// [`CollectiveError::Setup`] for no ranks, or when threads or devices cannot be had.
pub fn run<T: Send>(
    size: usize,
    device: impl Fn(usize) -> Result<Arc<dyn Device>, moesaic_target::DeviceError>,
    body: impl Fn(Communicator) -> T + Sync,
) -> Result<Vec<std::thread::Result<T>>, CollectiveError> {
    let setup = |reason: String| CollectiveError::Setup { reason };
    if size == 0 {
        return Err(setup(
            "a world has at least one rank; 0 were asked for".to_string(),
        ));
    }
    let devices = (0..size).map(device).collect::<Result<Vec<_>, _>>();
    let devices = devices.map_err(|error| setup(error.to_string()))?;
    let communicators = world(size).into_iter().zip(devices);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (transport, device) in communicators {
            let communicator = Communicator::new(Box::new(transport), device);
            let name = format!("rank {}", threads.len());
            let body = &body;
            let builder = std::thread::Builder::new().name(name);
            let thread = builder.spawn_scoped(scope, move || body(communicator));
            threads.push(thread.map_err(|error| setup(error.to_string()))?);
        }
        Ok(threads.into_iter().map(|thread| thread.join()).collect())
    })
}

/// The transports of a world's ranks, in their order.
pub fn world(size: usize) -> Vec<Threads> {
    let desk = || Desk {
        eager: Mutex::default(),
        rendezvous: Mutex::default(),
        state: AtomicU8::new(HERE),
    };
    let desks: Arc<[Desk]> = (0..size).map(|_| desk()).collect();
    let transport = |rank| Threads {
        rank,
        desks: Arc::clone(&desks),
        pending: HashMap::new(),
        next: 0,
    };
    (0..size).map(transport).collect()
}

/// One rank.
pub struct Threads {
    rank: usize,
    desks: Arc<[Desk]>,
    pending: HashMap<u64, Pending>,
    next: u64,
}

/// Where a rank's eager messages and rendezvous messages are left.
struct Desk {
    eager: Mutex<VecDeque<Vec<u8>>>,
    rendezvous: Mutex<HashMap<(usize, u32), Arc<Rendezvous>>>,
    state: AtomicU8,
}

const HERE: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// Memory of the sender, until it has been copied or taken back.
struct Rendezvous(Mutex<Offer>);

enum Offer {
    Offered(Vec<MemoryRange>),
    Taken,
    Withdrawn,
}

/// A rendezvous message that was begun here.
enum Pending {
    Sent {
        to: usize,
        tag: u32,
        rendezvous: Arc<Rendezvous>,
    },
    Awaited {
        from: usize,
        tag: u32,
        parts: Vec<MemoryRange>,
    },
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    fn begin(&mut self, pending: Pending) -> Request {
        self.next += 1;
        self.pending.insert(self.next, pending);
        Request(self.next)
    }

    /// Copies a rendezvous message that has been left here; false if there is none yet.
    fn take(&self, from: usize, tag: u32, parts: &[MemoryRange]) -> Result<bool, String> {
        let Some(rendezvous) = lock(&self.desks[self.rank].rendezvous).remove(&(from, tag)) else {
            return Ok(false);
        };
        let mut offer = lock(&rendezvous.0);
        let Offer::Offered(sent) = &*offer else {
            return Ok(false);
        };
        let sizes =
            |parts: &[MemoryRange]| -> Vec<usize> { parts.iter().map(|p| p.bytes).collect() };
        if sizes(sent) != sizes(parts) {
            let [sent, announced] = [sent, parts].map(MemoryRange::total);
            return Err(format!(
                "rank {from} sent a rendezvous of {sent} bytes where {announced} were announced, \
                 or in other parts"
            ));
        }
        for (from, to) in sent.iter().zip(parts) {
            // SAFETY: the sender keeps the memory until the offer is taken, which the
            // lock prevents meanwhile; the receiver's part is valid by `receive`.
            unsafe { std::ptr::copy(from.address, to.address, to.bytes) };
        }
        *offer = Offer::Taken;
        Ok(true)
    }
}

impl Transport for Threads {
    fn name(&self) -> String {
        "threads".to_string()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.desks.len()
    }

    fn last_tag(&self) -> u32 {
        u32::MAX
    }

    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), String> {
        lock(&self.desks[to].eager).push_back(message.to_vec());
        Ok(())
    }

    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, String> {
        Ok(lock(&self.desks[self.rank].eager).pop_front())
    }

    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, String> {
        let rendezvous = Arc::new(Rendezvous(Mutex::new(Offer::Offered(parts.to_vec()))));
        lock(&self.desks[to].rendezvous).insert((self.rank, tag), Arc::clone(&rendezvous));
        Ok(self.begin(Pending::Sent {
            to,
            tag,
            rendezvous,
        }))
    }

    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, String> {
        let parts = parts.to_vec();
        Ok(self.begin(Pending::Awaited { from, tag, parts }))
    }

    fn finished(&mut self, ticket: Request) -> Result<bool, String> {
        let done = match self.pending.get(&ticket.0) {
            // Who is copying it holds the lock; meanwhile there may be something else to do.
            Some(Pending::Sent { rendezvous, .. }) => match rendezvous.0.try_lock() {
                Ok(offer) => matches!(*offer, Offer::Taken),
                Err(TryLockError::Poisoned(offer)) => matches!(**offer.get_ref(), Offer::Taken),
                Err(TryLockError::WouldBlock) => false,
            },
            Some(Pending::Awaited { from, tag, parts }) => self.take(*from, *tag, parts)?,
            None => true,
        };
        if done {
            self.pending.remove(&ticket.0);
        }
        Ok(done)
    }

    fn gone(&self, rank: usize) -> Option<&'static str> {
        match self.desks[rank].state.load(Ordering::Acquire) {
            LEFT => Some("has ended without doing its part"),
            PANICKED => Some("has panicked"),
            _ => None,
        }
    }

    fn revoke(&mut self) -> bool {
        for pending in std::mem::take(&mut self.pending).into_values() {
            if let Pending::Sent {
                to,
                tag,
                rendezvous,
            } = pending
            {
                lock(&self.desks[to].rendezvous).remove(&(self.rank, tag));
                *lock(&rendezvous.0) = Offer::Withdrawn;
            }
        }
        true
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.revoke();
        let state = if std::thread::panicking() {
            PANICKED
        } else {
            LEFT
        };
        self.desks[self.rank].state.store(state, Ordering::Release);
    }
}
