//! A transport between threads of one process.

use crate::transport::{MemoryRange, Request, Transport, TransportError};
use crate::{CollectiveError, Communicator, SetupError};
use moesaic_target::Device;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

/// Runs `body` on `size` ranks, each a thread with its own device. Returns each rank's result or
/// its panic. A panic on one rank fails the operations of the others.
///
/// # Errors
/// [`CollectiveError::Setup`] as [`check_size`] says, or when threads or devices cannot be had.
pub fn run<T: Send>(
    size: usize,
    device: impl Fn(usize) -> Result<Arc<dyn Device>, moesaic_target::DeviceError>,
    body: impl Fn(Communicator) -> T + Sync,
) -> Result<Vec<std::thread::Result<T>>, CollectiveError> {
    check_size(size).map_err(CollectiveError::setup)?;
    let devices = (0..size).map(device).collect::<Result<Vec<_>, _>>();
    let devices = devices.map_err(CollectiveError::setup)?;
    let communicators = world(size).into_iter().zip(devices);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (transport, device) in communicators {
            let communicator = Communicator::new(Box::new(transport), device);
            let name = format!("rank {}", threads.len());
            let body = &body;
            let builder = std::thread::Builder::new().name(name);
            let thread = builder.spawn_scoped(scope, move || body(communicator));
            let thread = thread.map_err(|error| {
                CollectiveError::setup(SetupError::Thread {
                    purpose: "run a rank",
                    source: error.into(),
                })
            });
            threads.push(thread?);
        }
        Ok(threads.into_iter().map(|thread| thread.join()).collect())
    })
}

/// The ranks that may be threads of one processor. Messages of a call grow with the square of the
/// ranks, and every rank gives up after [`DEADLINE`](crate::DEADLINE): twice as many may miss it.
const RANKS_OF_A_PROCESSOR: usize = 128;

/// Checks that a world of `size` ranks can be threads of this process.
///
/// # Errors
/// [`SetupError`] for no ranks, and for more than the processors carry.
pub fn check_size(size: usize) -> Result<(), SetupError> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let most = processors * RANKS_OF_A_PROCESSOR;
    match size {
        0 => Err(SetupError::NoRanks),
        asked if asked > most => Err(SetupError::ManyThreads {
            asked,
            most,
            processors,
        }),
        _ => Ok(()),
    }
}

/// Returns the transports of all ranks of a world, in rank order.
pub fn world(size: usize) -> Vec<Threads> {
    let mailbox = || Mailbox {
        eager: Mutex::default(),
        rendezvous: Mutex::default(),
        state: AtomicU8::new(HERE),
    };
    let mailboxes: Arc<[Mailbox]> = (0..size).map(|_| mailbox()).collect();
    let transport = |rank| Threads {
        rank,
        mailboxes: Arc::clone(&mailboxes),
        pending: HashMap::new(),
        next: 0,
    };
    (0..size).map(transport).collect()
}

/// The transport of one rank.
pub struct Threads {
    rank: usize,
    mailboxes: Arc<[Mailbox]>,
    pending: HashMap<u64, Pending>,
    next: u64,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads")
            .field("rank", &self.rank)
            .field("size", &self.mailboxes.len())
            .finish_non_exhaustive()
    }
}

/// The place where other ranks leave messages for one rank.
struct Mailbox {
    eager: Mutex<VecDeque<Vec<u8>>>,
    rendezvous: Mutex<HashMap<(usize, u32), Arc<Rendezvous>>>,
    state: AtomicU8,
}

const HERE: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// The sender's memory, until the receiver has copied it or the sender has revoked it.
struct Rendezvous(Mutex<Offer>);

enum Offer {
    Offered(Vec<MemoryRange>),
    Received,
    Withdrawn,
}

/// A rendezvous message that this rank began.
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

    /// Copies a rendezvous message that another rank has left here. Returns false if there is
    /// none yet.
    fn take(&self, from: usize, tag: u32, parts: &[MemoryRange]) -> Result<bool, TransportError> {
        let Some(rendezvous) = lock(&self.mailboxes[self.rank].rendezvous).remove(&(from, tag))
        else {
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
            return Err(TransportError::Size {
                peer: from,
                sent,
                announced,
            });
        }
        for (from, to) in sent.iter().zip(parts) {
            // SAFETY: the sender keeps its memory until the offer is taken, and the lock prevents
            // that meanwhile; the receiver's part is valid by the contract of `receive`.
            unsafe { std::ptr::copy(from.address, to.address, to.bytes) };
        }
        *offer = Offer::Received;
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
        self.mailboxes.len()
    }

    fn last_tag(&self) -> u32 {
        u32::MAX
    }

    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        lock(&self.mailboxes[to].eager).push_back(message.to_vec());
        Ok(())
    }

    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, TransportError> {
        Ok(lock(&self.mailboxes[self.rank].eager).pop_front())
    }

    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        let rendezvous = Arc::new(Rendezvous(Mutex::new(Offer::Offered(parts.to_vec()))));
        lock(&self.mailboxes[to].rendezvous).insert((self.rank, tag), Arc::clone(&rendezvous));
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
    ) -> Result<Request, TransportError> {
        let parts = parts.to_vec();
        Ok(self.begin(Pending::Awaited { from, tag, parts }))
    }

    fn finished(&mut self, request: Request) -> Result<bool, TransportError> {
        let done = match self.pending.get(&request.0) {
            // The receiver holds the lock while it copies; try again later, since other work may
            // be possible.
            Some(Pending::Sent { rendezvous, .. }) => match rendezvous.0.try_lock() {
                Ok(offer) => matches!(*offer, Offer::Received),
                Err(TryLockError::Poisoned(offer)) => matches!(**offer.get_ref(), Offer::Received),
                Err(TryLockError::WouldBlock) => false,
            },
            Some(Pending::Awaited { from, tag, parts }) => self.take(*from, *tag, parts)?,
            None => true,
        };
        if done {
            self.pending.remove(&request.0);
        }
        Ok(done)
    }

    fn gone(&self, rank: usize) -> Option<&'static str> {
        match self.mailboxes[rank].state.load(Ordering::Acquire) {
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
                lock(&self.mailboxes[to].rendezvous).remove(&(self.rank, tag));
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
        self.mailboxes[self.rank]
            .state
            .store(state, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ranks_than_processors_carry_are_refused_at_once() {
        assert!(check_size(1).is_ok() && check_size(RANKS_OF_A_PROCESSOR).is_ok());
        let text = |size| match run(size, |_| unreachable!("no device is opened"), |_| ()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{size} ranks"),
        };
        assert!(text(0).contains("at least one rank"));
        let most = usize::MAX / 2;
        let many = text(most);
        assert!(
            many.contains(&format!("{most} ranks")) && many.contains("or fewer"),
            "{many}"
        );
    }

    #[test]
    fn another_size_than_announced_is_an_error() {
        let [mut first, mut second] = <[Threads; 2]>::try_from(world(2)).ok().unwrap();
        let (mut sent, mut found) = ([1u8; 8], [0u8; 4]);
        let range = |bytes: &mut [u8]| MemoryRange {
            address: bytes.as_mut_ptr(),
            bytes: bytes.len(),
        };
        // SAFETY: both arrays live until the transports have revoked the message.
        let (_, awaited) = unsafe {
            (
                first.send(1, 0, &[range(&mut sent)]).unwrap(),
                second.receive(0, 0, &[range(&mut found)]).unwrap(),
            )
        };
        let size = TransportError::Size {
            peer: 0,
            sent: 8,
            announced: 4,
        };
        assert_eq!(second.finished(awaited), Err(size));
        assert!(first.revoke() && second.revoke());
        assert_eq!(found, [0; 4]);
    }
}
