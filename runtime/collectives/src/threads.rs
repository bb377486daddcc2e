//! Ranks that are threads of one process.

use crate::engine::{Engine, Part, Ticket};
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
        for (engine, device) in communicators {
            let communicator = Communicator::new(Box::new(engine), device);
            let name = format!("rank {}", threads.len());
            let body = &body;
            let builder = std::thread::Builder::new().name(name);
            let thread = builder.spawn_scoped(scope, move || body(communicator));
            threads.push(thread.map_err(|error| setup(error.to_string()))?);
        }
        Ok(threads.into_iter().map(|thread| thread.join()).collect())
    })
}

/// The engines of a world's ranks, in their order.
pub fn world(size: usize) -> Vec<Threads> {
    let desk = || Desk {
        letters: Mutex::default(),
        parcels: Mutex::default(),
        state: AtomicU8::new(HERE),
    };
    let desks: Arc<[Desk]> = (0..size).map(|_| desk()).collect();
    let engine = |rank| Threads {
        rank,
        desks: Arc::clone(&desks),
        pending: HashMap::new(),
        next: 0,
    };
    (0..size).map(engine).collect()
}

/// One rank.
pub struct Threads {
    rank: usize,
    desks: Arc<[Desk]>,
    pending: HashMap<u64, Pending>,
    next: u64,
}

/// Where a rank's letters and parcels are left.
struct Desk {
    letters: Mutex<VecDeque<Vec<u8>>>,
    parcels: Mutex<HashMap<(usize, u32), Arc<Parcel>>>,
    state: AtomicU8,
}

const HERE: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// Memory of the sender, until it has been copied or taken back.
struct Parcel(Mutex<Offer>);

enum Offer {
    Offered(Vec<Part>),
    Taken,
    Withdrawn,
}

/// A parcel that was begun here.
enum Pending {
    Sent {
        to: usize,
        tag: u32,
        parcel: Arc<Parcel>,
    },
    Awaited {
        from: usize,
        tag: u32,
        parts: Vec<Part>,
    },
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    fn begin(&mut self, pending: Pending) -> Ticket {
        self.next += 1;
        self.pending.insert(self.next, pending);
        Ticket(self.next)
    }

    /// Copies a parcel that has been left here; false if there is none yet.
    fn take(&self, from: usize, tag: u32, parts: &[Part]) -> Result<bool, String> {
        let Some(parcel) = lock(&self.desks[self.rank].parcels).remove(&(from, tag)) else {
            return Ok(false);
        };
        let mut offer = lock(&parcel.0);
        let Offer::Offered(sent) = &*offer else {
            return Ok(false);
        };
        let sizes = |parts: &[Part]| -> Vec<usize> { parts.iter().map(|p| p.bytes).collect() };
        if sizes(sent) != sizes(parts) {
            let [sent, announced] = [sent, parts].map(Part::total);
            return Err(format!(
                "rank {from} sent a parcel of {sent} bytes where {announced} were announced, \
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

impl Engine for Threads {
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

    fn post(&mut self, to: usize, letter: &[u8]) -> Result<(), String> {
        lock(&self.desks[to].letters).push_back(letter.to_vec());
        Ok(())
    }

    fn collect(&mut self) -> Result<Option<Vec<u8>>, String> {
        Ok(lock(&self.desks[self.rank].letters).pop_front())
    }

    unsafe fn send(&mut self, to: usize, tag: u32, parts: &[Part]) -> Result<Ticket, String> {
        let parcel = Arc::new(Parcel(Mutex::new(Offer::Offered(parts.to_vec()))));
        lock(&self.desks[to].parcels).insert((self.rank, tag), Arc::clone(&parcel));
        Ok(self.begin(Pending::Sent { to, tag, parcel }))
    }

    unsafe fn receive(&mut self, from: usize, tag: u32, parts: &[Part]) -> Result<Ticket, String> {
        let parts = parts.to_vec();
        Ok(self.begin(Pending::Awaited { from, tag, parts }))
    }

    fn finished(&mut self, ticket: Ticket) -> Result<bool, String> {
        let done = match self.pending.get(&ticket.0) {
            // Who is copying it holds the lock; meanwhile there may be something else to do.
            Some(Pending::Sent { parcel, .. }) => match parcel.0.try_lock() {
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
            if let Pending::Sent { to, tag, parcel } = pending {
                lock(&self.desks[to].parcels).remove(&(self.rank, tag));
                *lock(&parcel.0) = Offer::Withdrawn;
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
