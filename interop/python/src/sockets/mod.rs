//! A transport over TCP, between processes that know each other's addresses.
//!
//! Gloo's point-to-point messages cannot be polled, which a [`Transport`] must do, and need the GIL.
//! So a process group of torch only introduces the ranks: it carries their addresses and a key.
//! Ranks then keep one connection with each other. A stranger who connects does not know the key.

mod join;
mod peer;

pub(crate) use join::join;
pub use join::{Hello, listen};

use moesaic::collectives::Transport;
use moesaic::collectives::transport::{MemoryRange, Request, TransportError};
use peer::Peer;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time that a rank that leaves gives its last messages.
const LINGER: Duration = Duration::from_secs(2);

/// The connections of one rank.
pub struct Connections {
    rank: usize,
    /// By rank; none with itself.
    peers: Vec<Option<Peer>>,
    /// Eager messages that have arrived.
    eager: VecDeque<Vec<u8>>,
    /// Rendezvous messages in flight.
    open: HashSet<u64>,
    next: u64,
    left: bool,
}

impl Connections {
    fn new(rank: usize, peers: Vec<Option<Peer>>) -> Connections {
        Connections {
            rank,
            peers,
            eager: VecDeque::new(),
            open: HashSet::new(),
            next: 0,
            left: false,
        }
    }

    /// Moves whatever can move without waiting.
    fn progress(&mut self) -> Result<(), TransportError> {
        for peer in self.peers.iter_mut().flatten() {
            peer.progress(&mut self.eager, &mut self.open)?;
        }
        Ok(())
    }

    fn peer(&mut self, rank: usize) -> Result<&mut Peer, TransportError> {
        let found = self.peers.get_mut(rank).and_then(Option::as_mut);
        found.ok_or(TransportError::NotConnected {
            rank: self.rank,
            peer: rank,
        })
    }

    fn begin(&mut self) -> u64 {
        self.next += 1;
        self.open.insert(self.next);
        self.next
    }

    fn unsent(&self) -> usize {
        self.peers.iter().flatten().map(Peer::unsent).sum()
    }

    /// Ends the connections so that the last messages of both sides arrive: a socket that is closed
    /// with unread bytes would take back what it has sent.
    pub fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        for peer in self.peers.iter_mut().flatten() {
            peer.revoke();
        }
        let until = Instant::now() + LINGER;
        let poll = |connections: &mut Connections, done: fn(&Peer) -> bool| {
            let is_done = |connections: &Connections| connections.peers.iter().flatten().all(done);
            while !is_done(connections) && Instant::now() < until {
                if connections.progress().is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        };
        poll(self, |peer| peer.ended() || peer.unsent() == 0);
        for peer in self.peers.iter().flatten() {
            peer.stop_sending();
        }
        poll(self, Peer::ended);
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The transport of one rank. Clones share the connections.
#[derive(Clone)]
pub struct Sockets(Arc<Mutex<Connections>>);

impl Sockets {
    fn new(connections: Connections) -> Sockets {
        Sockets(Arc::new(Mutex::new(connections)))
    }

    /// Returns the connections, for a rank that leaves.
    pub fn lock(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Sockets {
    fn name(&self) -> String {
        "TCP between the ranks of a torch process group".to_string()
    }

    fn rank(&self) -> usize {
        self.lock().rank
    }

    fn size(&self) -> usize {
        self.lock().peers.len()
    }

    fn last_tag(&self) -> u32 {
        u32::MAX
    }

    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        let mut own = self.lock();
        if to == own.rank {
            own.eager.push_back(message.to_vec());
            return Ok(());
        }
        own.peer(to)?.send_eager(message);
        own.progress()
    }

    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, TransportError> {
        let mut own = self.lock();
        own.progress()?;
        Ok(own.eager.pop_front())
    }

    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        let mut own = self.lock();
        let id = own.begin();
        own.peer(to)?.send(id, tag, parts);
        own.progress()?;
        Ok(Request(id))
    }

    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        let mut own = self.lock();
        let id = own.begin();
        let there = own.peer(from)?.receive(id, tag, parts)?;
        if there {
            own.open.remove(&id);
        }
        Ok(Request(id))
    }

    fn finished(&mut self, request: Request) -> Result<bool, TransportError> {
        let mut own = self.lock();
        own.progress()?;
        Ok(!own.open.contains(&request.0))
    }

    fn gone(&self, rank: usize) -> Option<&'static str> {
        let own = self.lock();
        let peer = own.peers.get(rank)?.as_ref()?;
        peer.ended().then_some("has closed its connection")
    }

    fn revoke(&mut self) -> bool {
        let mut own = self.lock();
        for peer in own.peers.iter_mut().flatten() {
            peer.revoke();
        }
        own.open.clear();
        true
    }

    fn unsent_eager(&mut self) -> usize {
        let mut own = self.lock();
        // A failure shows at the next call that returns one.
        let _ = own.progress();
        own.unsent()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks over this machine's loopback.
    fn pair() -> [Sockets; 2] {
        let listeners = [(); 2].map(|()| listen("127.0.0.1").unwrap());
        let addresses = listeners
            .each_ref()
            .map(|l| l.local_addr().unwrap().to_string());
        let mut joined = listeners.into_iter().enumerate().map(|(rank, listener)| {
            let addresses = addresses.to_vec();
            std::thread::spawn(move || {
                let hello = Hello { rank, key: [7; 16] };
                join(&listener, &hello, &addresses, Duration::from_secs(10)).unwrap()
            })
        });
        let threads = [joined.next().unwrap(), joined.next().unwrap()];
        threads.map(|thread| thread.join().unwrap())
    }

    fn range(values: &mut [u8]) -> MemoryRange {
        MemoryRange {
            address: values.as_mut_ptr(),
            bytes: values.len(),
        }
    }

    fn finish(sockets: &mut [Sockets; 2], requests: &[(usize, Request)]) {
        for (rank, request) in requests {
            while !sockets[*rank].finished(*request).unwrap() {
                let other = &mut sockets[1 - rank];
                assert_eq!(other.unsent_eager(), 0);
            }
        }
    }

    #[test]
    fn messages_arrive_in_parts_whoever_is_first() {
        let mut sockets = pair();
        let mut sent: Vec<u8> = (0..3_000_000u32).map(|i| i as u8).collect();
        let mut found = vec![0u8; sent.len()];
        for receives_first in [true, false] {
            found.fill(0);
            let (head, tail) = sent.split_at_mut(11);
            let send = [range(head), range(tail)];
            let (head, tail) = found.split_at_mut(11);
            let receive = [range(head), range(tail)];
            // SAFETY: the memory lives until both are finished.
            let requests = unsafe {
                if receives_first {
                    let receive = sockets[1].receive(0, 5, &receive).unwrap();
                    [(1, receive), (0, sockets[0].send(1, 5, &send).unwrap())]
                } else {
                    let send = sockets[0].send(1, 5, &send).unwrap();
                    for _ in 0..100 {
                        sockets[1].receive_eager().unwrap();
                    }
                    [(0, send), (1, sockets[1].receive(0, 5, &receive).unwrap())]
                }
            };
            finish(&mut sockets, &requests);
            assert!(found == sent);
        }
    }

    #[test]
    fn eager_messages_keep_their_order_and_survive_the_senders_end() {
        let [mut first, mut second] = pair();
        for number in 0..100u8 {
            first.send_eager(1, &[number; 40]).unwrap();
        }
        let left = std::thread::spawn(move || drop(first));
        let mut next = 0;
        while next < 100 {
            if let Some(message) = second.receive_eager().unwrap() {
                assert_eq!(message, [next; 40]);
                next += 1;
            }
        }
        while second.gone(0).is_none() {
            assert_eq!(second.receive_eager().unwrap(), None);
        }
        drop(second);
        left.join().unwrap();
    }

    #[test]
    fn another_size_is_an_error() {
        let mut sockets = pair();
        let (mut sent, mut found) = ([1u8; 8], [0u8; 4]);
        // SAFETY: the memory outlives the sockets' use of it, which `revoke` ends.
        unsafe {
            sockets[0].send(1, 1, &[range(&mut sent)]).unwrap();
            let request = sockets[1].receive(0, 1, &[range(&mut found)]);
            let problem = request.and_then(|request| {
                loop {
                    if sockets[1].finished(request)? {
                        return Ok(());
                    }
                }
            });
            let problem = problem.unwrap_err();
            let size = TransportError::Size {
                peer: 0,
                sent: 8,
                announced: 4,
            };
            assert_eq!(problem, size);
        }
        assert!(sockets[0].revoke() && sockets[1].revoke());
    }

    #[test]
    fn a_stranger_is_turned_away_and_a_missing_rank_is_named() {
        let listener = listen("127.0.0.1").unwrap();
        let address = listener.local_addr().unwrap();
        let addresses = vec![address.to_string(); 2];
        let stranger = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(&[0; 20]).unwrap();
            stream.read(&mut [0; 1]).unwrap_or(0)
        });
        let hello = Hello {
            rank: 0,
            key: [7; 16],
        };
        let error = join(&listener, &hello, &addresses, Duration::from_millis(300));
        let error = error.err().unwrap();
        assert!(error.contains("rank 1 has not come"), "{error}");
        assert_eq!(stranger.join().unwrap(), 0);
    }
}
