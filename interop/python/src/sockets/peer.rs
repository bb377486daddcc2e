//! One connection: frames out, frames in.
//!
//! A frame is a kind, a tag and a length, then so many bytes. The receiver of a rendezvous message
//! reads it into the caller's memory if it has been asked for, else into memory of its own.

use moesaic::collectives::transport::{MemoryRange, TransportError};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

const HEADER: usize = 13;
const EAGER: u8 = 1;
const RENDEZVOUS: u8 = 2;

/// Bytes read before other connections have their turn.
const TURN: usize = 1 << 20;

/// A frame on its way out: bytes of this side, then parts of the caller's memory.
struct Frame {
    bytes: Vec<u8>,
    parts: Vec<MemoryRange>,
    sent: usize,
    request: Option<u64>,
}

impl Frame {
    fn new(kind: u8, tag: u32, body: &[u8], parts: &[MemoryRange]) -> Frame {
        let length = body.len() + MemoryRange::total(parts);
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.push(kind);
        bytes.extend(tag.to_le_bytes());
        bytes.extend((length as u64).to_le_bytes());
        bytes.extend(body);
        Frame {
            bytes,
            parts: parts.to_vec(),
            sent: 0,
            request: None,
        }
    }

    /// Returns the next bytes to send; empty at the end.
    fn rest(&self) -> &[u8] {
        if self.sent < self.bytes.len() {
            return &self.bytes[self.sent..];
        }
        match at(&self.parts, self.sent - self.bytes.len()) {
            None => &[],
            // SAFETY: the sender keeps its memory until the request is finished or revoked, and
            // revoking replaces the parts.
            Some(range) => unsafe { std::slice::from_raw_parts(range.address, range.bytes) },
        }
    }

    /// Copies the caller's memory, so that it is not needed any more.
    fn own(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        for range in parts.iter().filter(|range| range.bytes > 0) {
            // SAFETY: as in `rest`: the request is still in flight.
            let part = unsafe { std::slice::from_raw_parts(range.address, range.bytes) };
            self.bytes.extend(part);
        }
    }
}

/// Returns what is left of the part that has byte `offset` of all parts together.
fn at(parts: &[MemoryRange], mut offset: usize) -> Option<MemoryRange> {
    for part in parts {
        if offset < part.bytes {
            return Some(MemoryRange {
                // SAFETY: the offset is inside the part.
                address: unsafe { part.address.add(offset) },
                bytes: part.bytes - offset,
            });
        }
        offset -= part.bytes;
    }
    None
}

/// A frame on its way in.
struct Incoming {
    kind: u8,
    tag: u32,
    length: usize,
    have: usize,
    to: Target,
}

enum Target {
    Own(Vec<u8>),
    Caller(u64, Vec<MemoryRange>),
}

/// One connection.
pub struct Peer {
    /// The rank at its other end.
    rank: usize,
    stream: TcpStream,
    out: VecDeque<Frame>,
    header: [u8; HEADER],
    header_bytes: usize,
    incoming: Option<Incoming>,
    /// Rendezvous messages that nobody has asked for yet, by tag.
    arrived: HashMap<u32, Vec<u8>>,
    /// The caller's memory for messages that have not come yet, by tag.
    awaited: HashMap<u32, (u64, Vec<MemoryRange>)>,
    ended: bool,
}

impl Peer {
    /// Takes a connection with `rank` whose two ends have greeted each other.
    pub fn new(rank: usize, stream: TcpStream) -> std::io::Result<Peer> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Peer {
            rank,
            stream,
            out: VecDeque::new(),
            header: [0; HEADER],
            header_bytes: 0,
            incoming: None,
            arrived: HashMap::new(),
            awaited: HashMap::new(),
            ended: false,
        })
    }

    /// Returns whether the other side has closed the connection.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Returns the number of frames that have not left whole.
    pub fn unsent(&self) -> usize {
        self.out.len()
    }

    /// Says that nothing more will come.
    pub fn stop_sending(&self) {
        // Of a connection that is gone there is nothing to end.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    pub fn send_eager(&mut self, message: &[u8]) {
        self.out.push_back(Frame::new(EAGER, 0, message, &[]));
    }

    pub fn send(&mut self, id: u64, tag: u32, parts: &[MemoryRange]) {
        let frame = Frame::new(RENDEZVOUS, tag, &[], parts);
        self.out.push_back(Frame {
            request: Some(id),
            ..frame
        });
    }

    /// Receives into memory of the caller's. Returns whether the message was there already.
    pub fn receive(
        &mut self,
        id: u64,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<bool, TransportError> {
        let Some(bytes) = self.arrived.remove(&tag) else {
            self.awaited.insert(tag, (id, parts.to_vec()));
            return Ok(false);
        };
        scatter(self.rank, &bytes, parts)?;
        Ok(true)
    }

    /// Lets go of the callers' memory: messages on their way are copied, or read and dropped.
    pub fn revoke(&mut self) {
        self.out.iter_mut().for_each(Frame::own);
        self.awaited.clear();
        self.arrived.clear();
        if let Some(incoming) = &mut self.incoming
            && let Target::Caller(..) = incoming.to
        {
            incoming.to = Target::Own(vec![0; incoming.length]);
        }
    }

    /// Sends and receives what goes without waiting. Finished requests leave `open`.
    pub fn progress(
        &mut self,
        eager: &mut VecDeque<Vec<u8>>,
        open: &mut HashSet<u64>,
    ) -> Result<(), TransportError> {
        self.write(open)?;
        let mut turn = 0;
        while !self.ended && turn < TURN {
            match self.read(eager, open)? {
                0 => break,
                bytes => turn += bytes,
            }
        }
        Ok(())
    }

    fn write(&mut self, open: &mut HashSet<u64>) -> Result<(), TransportError> {
        while let Some(frame) = self.out.front_mut() {
            let rest = frame.rest();
            if rest.is_empty() {
                if let Some(id) = frame.request {
                    open.remove(&id);
                }
                self.out.pop_front();
                continue;
            }
            match self.stream.write(rest) {
                Ok(bytes) => frame.sent += bytes,
                Err(error) if waits(error.kind()) => return Ok(()),
                // What arrived before is still read; `ended` follows from there.
                Err(error) if is_end(error.kind()) => {
                    self.out.clear();
                    return Ok(());
                }
                Err(error) => return Err(broken(self.rank, "cannot be sent to", &error)),
            }
        }
        Ok(())
    }

    /// Reads once. Returns the number of bytes.
    fn read(
        &mut self,
        eager: &mut VecDeque<Vec<u8>>,
        open: &mut HashSet<u64>,
    ) -> Result<usize, TransportError> {
        let space: &mut [u8] = match &mut self.incoming {
            None => &mut self.header[self.header_bytes..],
            Some(Incoming {
                to: Target::Own(bytes),
                have,
                ..
            }) => &mut bytes[*have..],
            Some(Incoming {
                to: Target::Caller(_, parts),
                have,
                ..
            }) => match at(parts, *have) {
                None => &mut [],
                // SAFETY: the receiver keeps its memory until the request is finished or revoked,
                // and revoking replaces it.
                Some(range) => unsafe {
                    std::slice::from_raw_parts_mut(range.address, range.bytes)
                },
            },
        };
        let bytes = match self.stream.read(space) {
            Ok(0) => {
                self.ended = true;
                return Ok(0);
            }
            Ok(bytes) => bytes,
            Err(error) if waits(error.kind()) => return Ok(0),
            Err(error) if is_end(error.kind()) => {
                self.ended = true;
                return Ok(0);
            }
            Err(error) => return Err(broken(self.rank, "cannot be received from", &error)),
        };
        match &mut self.incoming {
            None => self.header_bytes += bytes,
            Some(incoming) => incoming.have += bytes,
        }
        if self.header_bytes == HEADER && self.incoming.is_none() {
            self.header_bytes = 0;
            self.incoming = Some(self.announced()?);
        }
        let whole = |incoming: &mut Incoming| incoming.have == incoming.length;
        if let Some(incoming) = self.incoming.take_if(whole) {
            self.take(incoming, eager, open)?;
        }
        Ok(bytes)
    }

    /// Returns the frame that the header announces.
    fn announced(&mut self) -> Result<Incoming, TransportError> {
        let [kind, tag @ .., _, _, _, _, _, _, _, _] = self.header;
        let mut length = [0; 8];
        length.copy_from_slice(&self.header[HEADER - 8..]);
        let (tag, length) = (u32::from_le_bytes(tag), u64::from_le_bytes(length) as usize);
        let awaited = match kind {
            EAGER => None,
            RENDEZVOUS => self.awaited.remove(&tag),
            _ => return Err(TransportError::NoFrame { peer: self.rank }),
        };
        let to = match awaited {
            None => Target::Own(vec![0; length]),
            Some((id, parts)) => {
                check(self.rank, length, &parts)?;
                Target::Caller(id, parts)
            }
        };
        Ok(Incoming {
            kind,
            tag,
            length,
            have: 0,
            to,
        })
    }

    /// Hands a whole frame on.
    fn take(
        &mut self,
        incoming: Incoming,
        eager: &mut VecDeque<Vec<u8>>,
        open: &mut HashSet<u64>,
    ) -> Result<(), TransportError> {
        match (incoming.kind, incoming.to) {
            (EAGER, Target::Own(bytes)) => eager.push_back(bytes),
            (_, Target::Caller(id, _)) => {
                open.remove(&id);
            }
            // It may have been asked for while it came.
            (_, Target::Own(bytes)) => match self.awaited.remove(&incoming.tag) {
                Some((id, parts)) => {
                    scatter(self.rank, &bytes, &parts)?;
                    open.remove(&id);
                }
                None => {
                    self.arrived.insert(incoming.tag, bytes);
                }
            },
        }
        Ok(())
    }
}

fn waits(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn is_end(kind: ErrorKind) -> bool {
    use ErrorKind as E;
    matches!(
        kind,
        E::ConnectionReset | E::ConnectionAborted | E::BrokenPipe | E::NotConnected
    )
}

fn broken(peer: usize, problem: &'static str, error: &std::io::Error) -> TransportError {
    TransportError::Connection {
        peer,
        problem,
        kind: error.kind(),
        message: error.to_string(),
    }
}

fn check(peer: usize, sent: usize, parts: &[MemoryRange]) -> Result<(), TransportError> {
    match MemoryRange::total(parts) {
        announced if announced == sent => Ok(()),
        announced => Err(TransportError::Size {
            peer,
            sent,
            announced,
        }),
    }
}

fn scatter(peer: usize, bytes: &[u8], parts: &[MemoryRange]) -> Result<(), TransportError> {
    check(peer, bytes.len(), parts)?;
    let mut rest = bytes;
    for part in parts.iter().filter(|part| part.bytes > 0) {
        let (own, more) = rest.split_at(part.bytes);
        // SAFETY: the receiver keeps so many bytes until the request is finished.
        unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), part.address, own.len()) };
        rest = more;
    }
    Ok(())
}
