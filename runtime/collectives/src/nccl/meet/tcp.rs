//! Meeting of ranks at rank 0's address: it accepts a card from each rank, answers each once with
//! all cards, and closes when every rank has confirmed them.

use super::{CARD_BYTES, Guest, join, split};
use crate::error::{MeetingError, shown};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

const MAGIC: &[u8; 8] = b"moesaic1";
/// Magic, token, rank, number of ranks, bytes of the card.
const HEAD: usize = 8 + 8 + 4 + 4 + 4;
const THANKS: u8 = 0x6b;
const GLANCE: Duration = Duration::from_millis(1);
/// The first and the longest pause between two attempts to reach rank 0.
const SOON: Duration = Duration::from_millis(10);
const LATER: Duration = Duration::from_millis(500);
/// The time limit of one attempt.
const PATIENCE: Duration = Duration::from_secs(1);
/// The most unidentified connections that are kept open.
const MOST_OPEN: usize = 256;

/// Returns the cards of all ranks.
pub(super) fn gather(
    guest: &mut Guest,
    host: &str,
    port: u16,
) -> Result<Vec<Vec<u8>>, MeetingError> {
    let addresses = (host, port).to_socket_addrs();
    let addresses = addresses.map_err(|error| MeetingError::Host {
        host: host.to_string(),
        source: error.into(),
    })?;
    let addresses: Vec<SocketAddr> = addresses.collect();
    match guest.rank {
        0 => serve(guest, &addresses),
        _ => ask(guest, &addresses),
    }
}

/// A connection, perhaps of a rank.
struct Visitor {
    stream: TcpStream,
    heard: Vec<u8>,
    rank: Option<usize>,
    answer: Vec<u8>,
    thanked: bool,
}

/// Runs rank 0.
fn serve(guest: &mut Guest, addresses: &[SocketAddr]) -> Result<Vec<Vec<u8>>, MeetingError> {
    let listener = listen(guest, addresses)?;
    let mut cards: Vec<Option<Vec<u8>>> = vec![None; guest.size];
    cards[0] = Some(guest.card.clone());
    let mut served = vec![false; guest.size];
    served[0] = true;
    let mut visitors: Vec<Visitor> = Vec::new();
    loop {
        while let Ok((stream, _)) = listener.accept() {
            // A limit on connections keeps port scanners from exhausting file descriptors.
            if stream.set_nonblocking(true).is_ok() && visitors.len() < MOST_OPEN + guest.size {
                visitors.push(Visitor {
                    stream,
                    heard: Vec::new(),
                    rank: None,
                    answer: Vec::new(),
                    thanked: false,
                });
            }
        }
        // One thread polls all connections, so no visitor can block the others.
        visitors.retain_mut(|visitor| visitor.listen(guest, &mut cards));
        if let Some(all) = cards.iter().cloned().collect::<Option<Vec<_>>>() {
            visitors.retain_mut(|visitor| visitor.serve(&all, &mut served));
            if served.iter().all(|served| *served) {
                return Ok(all);
            }
        }
        if guest.late() {
            let missing = guest.missing(|rank| cards[rank].is_some() && served[rank]);
            return Err(MeetingError::Missing {
                missing,
                size: guest.size,
                place: shown(addresses),
                waited: guest.waited(),
            });
        }
        std::thread::sleep(GLANCE);
    }
}

/// Listens at one of the addresses and no other.
fn listen(guest: &mut Guest, addresses: &[SocketAddr]) -> Result<TcpListener, MeetingError> {
    let refused = |error: std::io::Error| MeetingError::Listen {
        addresses: addresses.to_vec(),
        source: error.into(),
    };
    loop {
        match TcpListener::bind(addresses) {
            Ok(listener) => {
                let free = listener.set_nonblocking(true);
                return free.map(|()| listener).map_err(refused);
            }
            // Connections of the last run may linger for a while.
            Err(error) if error.kind() == ErrorKind::AddrInUse && !guest.late() => {
                guest.pause(SOON);
            }
            Err(error) => return Err(refused(error)),
        }
    }
}

impl Visitor {
    /// Reads what has arrived; returns false for a connection that is closed or not of this job.
    fn listen(&mut self, guest: &Guest, cards: &mut [Option<Vec<u8>>]) -> bool {
        let (mut bytes, mut open) = ([0; 4096], true);
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    open = false;
                    break;
                }
                Ok(count) => self.heard.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
            // No rank sends more than this, so stop reading from strangers.
            if self.heard.len() > HEAD + CARD_BYTES + 1 {
                return false;
            }
        }
        if self.rank.is_some() {
            self.thanked |= self.heard.first() == Some(&THANKS);
            return open || self.thanked;
        }
        if !open {
            return false;
        }
        // The header may arrive in pieces; a wrong first byte is enough to hang up.
        let Some(head) = self.heard.get(..HEAD) else {
            return self.heard.iter().zip(MAGIC).all(|(a, b)| a == b);
        };
        let Some((rank, bytes)) = read_head(head, guest) else {
            return false;
        };
        if self.heard.len() < HEAD + bytes {
            return true;
        }
        cards[rank] = Some(self.heard[HEAD..HEAD + bytes].to_vec());
        self.heard.drain(..HEAD + bytes);
        self.rank = Some(rank);
        true
    }

    /// Sends the cards; returns false once the rank has them.
    fn serve(&mut self, all: &[Vec<u8>], served: &mut [bool]) -> bool {
        let Some(rank) = self.rank else {
            return true;
        };
        if self.thanked {
            served[rank] = true;
            return false;
        }
        if self.answer.is_empty() {
            let all = join(all);
            self.answer = [&(all.len() as u32).to_le_bytes()[..], &all].concat();
            // An extra last byte that is never sent keeps the answer non-empty until the rank
            // confirms.
            self.answer.push(0);
        }
        while self.answer.len() > 1 {
            let end = self.answer.len() - 1;
            match self.stream.write(&self.answer[..end]) {
                Ok(count) if count > 0 => drop(self.answer.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A rank that is still there connects again.
                _ => return false,
            }
        }
        true
    }
}

fn head(guest: &Guest) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(guest.token.to_le_bytes());
    for number in [guest.rank, guest.size, guest.card.len()] {
        head.extend((number as u32).to_le_bytes());
    }
    head
}

/// Returns rank and card size, if the sender belongs to this job.
fn read_head(head: &[u8], guest: &Guest) -> Option<(usize, usize)> {
    let (magic, rest) = head.split_at_checked(8)?;
    let (token, rest) = rest.split_first_chunk()?;
    let numbers = rest.as_chunks::<4>().0.iter();
    let numbers: Vec<usize> = numbers.map(|n| u32::from_le_bytes(*n) as usize).collect();
    let [rank, size, bytes] = numbers[..] else {
        return None;
    };
    let ours = magic == MAGIC && u64::from_le_bytes(*token) == guest.token;
    let fits = (1..guest.size).contains(&rank) && size == guest.size && bytes <= CARD_BYTES;
    (ours && fits).then_some((rank, bytes))
}

/// Runs every other rank: retries until rank 0 answers.
fn ask(guest: &mut Guest, addresses: &[SocketAddr]) -> Result<Vec<Vec<u8>>, MeetingError> {
    let mut pause = SOON;
    loop {
        let mut last = None;
        for address in addresses {
            match visit(guest, address) {
                Ok(all) => return Ok(all),
                Err(error) => last = Some(error.into()),
            }
        }
        if guest.late() {
            return Err(MeetingError::NotAnswered {
                rank: guest.rank,
                place: shown(addresses),
                waited: guest.waited(),
                last,
            });
        }
        guest.pause(pause);
        // Back off, because thousands of ranks may be waiting for a rank 0 that starts late.
        pause = (pause * 2).min(LATER);
    }
}

fn visit(guest: &Guest, address: &SocketAddr) -> std::io::Result<Vec<Vec<u8>>> {
    let mut stream = TcpStream::connect_timeout(address, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&[&head(guest)[..], &guest.card].concat())?;
    let mut length = [0; 4];
    wait_for(guest, &mut stream, &mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    let damaged = || std::io::Error::new(ErrorKind::InvalidData, "the answer is damaged");
    // Check before allocating: the peer may be another program.
    if length > guest.size * (CARD_BYTES + 4) {
        return Err(damaged());
    }
    let mut bytes = vec![0; length];
    wait_for(guest, &mut stream, &mut bytes)?;
    let all = split(&bytes, guest.size).ok_or_else(damaged)?;
    stream.write_all(&[THANKS])?;
    Ok(all)
}

/// Reads exactly these bytes; rank 0 answers only after the last rank has come.
fn wait_for(guest: &Guest, stream: &mut TcpStream, bytes: &mut [u8]) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut read = 0;
    while read < bytes.len() {
        match stream.read(&mut bytes[read..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => read += count,
            Err(error) if timed_out(&error) && !guest.late() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn timed_out(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}
