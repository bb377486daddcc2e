//! An engine of ranks that counts what goes through it.

use moesaic::collectives::Transport;
use moesaic::collectives::transport::{MemoryRange, Request, TransportError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a rank's messages and bytes.
#[derive(Debug, Default)]
pub struct Counts {
    eager: AtomicU64,
    eager_bytes: AtomicU64,
    rendezvous: AtomicU64,
    rendezvous_bytes: AtomicU64,
}

impl Counts {
    /// Eager messages, their bytes, rendezvous messages, their bytes.
    pub fn read(&self) -> [u64; 4] {
        let all = [
            &self.eager,
            &self.eager_bytes,
            &self.rendezvous,
            &self.rendezvous_bytes,
        ];
        all.map(|count| count.load(Ordering::Relaxed))
    }
}

/// Passes everything on.
pub struct Counted<E> {
    pub transport: E,
    pub counts: Arc<Counts>,
}

fn add(count: &AtomicU64, number: usize) {
    count.fetch_add(number as u64, Ordering::Relaxed);
}

impl<E: Transport> Transport for Counted<E> {
    fn name(&self) -> String {
        self.transport.name()
    }

    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    fn last_tag(&self) -> u32 {
        self.transport.last_tag()
    }

    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        add(&self.counts.eager, 1);
        add(&self.counts.eager_bytes, message.len());
        self.transport.send_eager(to, message)
    }

    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, TransportError> {
        self.transport.receive_eager()
    }

    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        add(&self.counts.rendezvous, 1);
        let bytes = parts.iter().map(|part| part.bytes).sum();
        add(&self.counts.rendezvous_bytes, bytes);
        // SAFETY: passed on.
        unsafe { self.transport.send(to, tag, parts) }
    }

    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        // SAFETY: passed on.
        unsafe { self.transport.receive(from, tag, parts) }
    }

    fn finished(&mut self, ticket: Request) -> Result<bool, TransportError> {
        self.transport.finished(ticket)
    }

    fn gone(&self, rank: usize) -> Option<&'static str> {
        self.transport.gone(rank)
    }

    fn revoke(&mut self) -> bool {
        self.transport.revoke()
    }

    fn unsent_eager(&mut self) -> usize {
        self.transport.unsent_eager()
    }

    fn close(&mut self) -> Result<(), TransportError> {
        self.transport.close()
    }
}
