//! An engine of ranks that counts what goes through it.

use moesaic::collectives::Engine;
use moesaic::collectives::engine::{Part, Ticket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a rank has sent.
#[derive(Debug, Default)]
pub struct Counts {
    letters: AtomicU64,
    letter_bytes: AtomicU64,
    parcels: AtomicU64,
    parcel_bytes: AtomicU64,
}

impl Counts {
    /// Letters, their bytes, parcels, their bytes.
    pub fn read(&self) -> [u64; 4] {
        let all = [
            &self.letters,
            &self.letter_bytes,
            &self.parcels,
            &self.parcel_bytes,
        ];
        all.map(|count| count.load(Ordering::Relaxed))
    }
}

/// Passes everything on.
pub struct Counted<E> {
    pub engine: E,
    pub counts: Arc<Counts>,
}

fn add(count: &AtomicU64, number: usize) {
    count.fetch_add(number as u64, Ordering::Relaxed);
}

impl<E: Engine> Engine for Counted<E> {
    fn name(&self) -> String {
        self.engine.name()
    }

    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn size(&self) -> usize {
        self.engine.size()
    }

    fn last_tag(&self) -> u32 {
        self.engine.last_tag()
    }

    fn post(&mut self, to: usize, letter: &[u8]) -> Result<(), String> {
        add(&self.counts.letters, 1);
        add(&self.counts.letter_bytes, letter.len());
        self.engine.post(to, letter)
    }

    fn collect(&mut self) -> Result<Option<Vec<u8>>, String> {
        self.engine.collect()
    }

    unsafe fn send(&mut self, to: usize, tag: u32, parts: &[Part]) -> Result<Ticket, String> {
        add(&self.counts.parcels, 1);
        let bytes = parts.iter().map(|part| part.bytes).sum();
        add(&self.counts.parcel_bytes, bytes);
        // SAFETY: passed on.
        unsafe { self.engine.send(to, tag, parts) }
    }

    unsafe fn receive(&mut self, from: usize, tag: u32, parts: &[Part]) -> Result<Ticket, String> {
        // SAFETY: passed on.
        unsafe { self.engine.receive(from, tag, parts) }
    }

    fn finished(&mut self, ticket: Ticket) -> Result<bool, String> {
        self.engine.finished(ticket)
    }

    fn gone(&self, rank: usize) -> Option<&'static str> {
        self.engine.gone(rank)
    }

    fn revoke(&mut self) -> bool {
        self.engine.revoke()
    }

    fn unposted(&mut self) -> usize {
        self.engine.unposted()
    }

    fn close(&mut self) -> Result<(), String> {
        self.engine.close()
    }
}
