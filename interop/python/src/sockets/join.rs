//! How ranks come to have a connection with each other.

use super::peer::Peer;
use super::{Connections, Sockets};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The first bytes of a connection: the key of the group, and who calls.
pub struct Hello {
    pub rank: usize,
    pub key: [u8; 16],
}

const HELLO: usize = 16 + 4;

impl Hello {
    fn bytes(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..16].copy_from_slice(&self.key);
        bytes[16..].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes
    }
}

/// Opens a port at an address of this machine.
pub fn listen(host: &str) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind((host, 0))?;
    // Ranks that do not come must not hold up the others for ever.
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects with the ranks at `addresses`: this rank calls those below it, those above call it.
///
/// # Errors
/// The rank that cannot be reached in time, with the reason.
pub(crate) fn join(
    listener: &TcpListener,
    own: &Hello,
    addresses: &[String],
    timeout: Duration,
) -> Result<Sockets, String> {
    let until = Instant::now() + timeout;
    let mut peers: Vec<Option<Peer>> = addresses.iter().map(|_| None).collect();
    let new = |rank, stream| Peer::new(rank, stream).map_err(|error| error.to_string());
    for (rank, address) in addresses.iter().enumerate().take(own.rank) {
        let stream = call(address, own, until);
        let stream = stream.map_err(|error| format!("rank {rank} at {address}: {error}"))?;
        peers[rank] = Some(new(rank, stream)?);
    }
    while let Some(missing) = (own.rank + 1..peers.len()).find(|rank| peers[*rank].is_none()) {
        if Instant::now() > until {
            return Err(format!("rank {missing} has not come in {timeout:?}"));
        }
        let Some((rank, stream)) = accept(listener, own, until)? else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let place = peers.get_mut(rank).filter(|_| rank > own.rank);
        match place {
            Some(place @ None) => *place = Some(new(rank, stream)?),
            _ => {
                return Err(format!(
                    "rank {rank} has come twice, or is none of the group"
                ));
            }
        }
    }
    Ok(Sockets::new(Connections::new(own.rank, peers)))
}

fn call(address: &str, own: &Hello, until: Instant) -> std::io::Result<TcpStream> {
    let found = address.to_socket_addrs()?.next();
    let found = found.ok_or_else(|| std::io::Error::other("the name has no address"))?;
    let left = until.saturating_duration_since(Instant::now());
    let mut stream = TcpStream::connect_timeout(&found, left.max(Duration::from_millis(1)))?;
    stream.write_all(&own.bytes())?;
    Ok(stream)
}

/// Takes one call, if there is one: who it is, and the connection. Those without the key are turned
/// away.
fn accept(
    listener: &TcpListener,
    own: &Hello,
    until: Instant,
) -> Result<Option<(usize, TcpStream)>, String> {
    let mut stream = match listener.accept() {
        Ok((stream, _)) => stream,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(format!("no rank can connect: {error}")),
    };
    let left = until.saturating_duration_since(Instant::now());
    let mut bytes = [0; HELLO];
    let greeted = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))))
        .and_then(|()| stream.read_exact(&mut bytes));
    if greeted.is_err() || bytes[..16] != own.key {
        return Ok(None);
    }
    let [.., a, b, c, d] = bytes;
    Ok(Some((u32::from_le_bytes([a, b, c, d]) as usize, stream)))
}
