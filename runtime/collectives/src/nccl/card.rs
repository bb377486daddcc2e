//! The cards by which ranks introduce themselves before they form a communicator.

use super::table::ID_BYTES;
use crate::{CollectiveError, SetupError};
use moesaic_target::Device;
use std::sync::OnceLock;

/// The first line of a card; cards of other versions are rejected.
const TITLE: &str = "moesaic nccl 2";

/// The introduction of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// `NCCL 2.28.3`.
    pub library: String,
    /// The host's name, with its boot id to distinguish hosts of equal name.
    pub host: String,
    /// The device's bus address, if it has one.
    pub bus: String,
    /// A name of this process that no other has.
    pub process: String,
    /// The device's number in this process.
    pub ordinal: usize,
    /// The communicator id; only rank 0 sends one.
    pub id: Vec<u8>,
}

impl Card {
    pub fn encode(&self) -> Vec<u8> {
        let id: String = self.id.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = |text: &str| text.replace('\n', " ");
        let (library, host, bus) = (line(&self.library), line(&self.host), line(&self.bus));
        let (process, ordinal) = (line(&self.process), self.ordinal);
        format!("{TITLE}\n{library}\n{host}\n{bus}\n{process}\n{ordinal}\n{id}\n").into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Card> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.lines();
        if lines.next()? != TITLE {
            return None;
        }
        let mut next = || Some(lines.next()?.to_string());
        let (library, host, bus) = (next()?, next()?, next()?);
        let (process, ordinal, id) = (next()?, next()?.parse().ok()?, next()?);
        let digits = id.as_bytes().as_chunks::<2>().0.iter();
        let byte = |pair: &[u8; 2]| {
            let text = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(text, 16).ok()
        };
        Some(Card {
            library,
            host,
            bus,
            process,
            ordinal,
            id: digits.map(byte).collect::<Option<_>>()?,
        })
    }
}

/// Returns this rank's host and its device's bus address.
pub fn place(host: Option<&str>, device: &dyn Device) -> (String, String) {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let boot = boot.unwrap_or_default();
    let host = match host {
        Some(given) => given.to_string(),
        None => format!("{} {}", crate::topology::host_name(), boot.trim()),
    };
    let bus = device
        .streams()
        .ok()
        .and_then(|gpu| gpu.gpu_info().bus.clone());
    (host, bus.unwrap_or_default())
}

/// Returns a name of this process. Ids would not do: processes in containers have the same ones.
pub fn process() -> String {
    static NAME: OnceLock<String> = OnceLock::new();
    let name = || std::fs::read_to_string("/proc/sys/kernel/random/uuid");
    let name = NAME.get_or_init(|| name().unwrap_or_else(|_| std::process::id().to_string()));
    name.trim().to_string()
}

/// The facts that follow from the cards of all ranks.
#[derive(Debug, PartialEq)]
pub struct Introduced {
    /// The communicator id of rank 0.
    pub id: [u8; ID_BYTES],
    /// The devices of the ranks in this process, by their numbers, in the order of ranks.
    pub devices: Vec<usize>,
}

/// Checks that these ranks can form a communicator.
pub fn check(cards: &[Vec<u8>], shared: bool) -> Result<Introduced, CollectiveError> {
    let read = |(rank, card): (usize, &Vec<u8>)| {
        Card::decode(card).ok_or_else(|| CollectiveError::setup(SetupError::OtherVersion { rank }))
    };
    let cards = cards.iter().enumerate().map(read);
    let cards = cards.collect::<Result<Vec<_>, _>>()?;
    let first = cards
        .first()
        .ok_or_else(|| CollectiveError::setup(SetupError::NoRanks))?;
    let others = cards.iter().enumerate();
    let other = |(rank, card): (usize, &Card)| {
        let (a, b) = (&first.library, &card.library);
        (a != b).then(|| format!("the library is {a} on rank 0 and {b} on rank {rank}"))
    };
    let differences: Vec<String> = others.filter_map(other).collect();
    if !differences.is_empty() {
        return Err(CollectiveError::Disagreement { differences });
    }
    if !shared {
        apart(&cards)?;
    }
    let id = <[u8; ID_BYTES]>::try_from(&first.id[..]);
    let own = process();
    let here = cards.iter().filter(|card| card.process == own);
    Ok(Introduced {
        id: id.map_err(|_| CollectiveError::setup(SetupError::NoId))?,
        devices: here.map(|card| card.ordinal).collect(),
    })
}

/// Checks that no two ranks share a device.
fn apart(cards: &[Card]) -> Result<(), CollectiveError> {
    let mut seen = std::collections::HashMap::new();
    for (rank, card) in cards
        .iter()
        .enumerate()
        .filter(|(_, card)| !card.bus.is_empty())
    {
        if let Some(first) = seen.insert((&card.host, &card.bus), rank) {
            return Err(CollectiveError::SharedDevice {
                ranks: [first, rank],
                host: card.host.split(' ').next().unwrap_or_default().to_string(),
                device: card.bus.clone(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(library: &str, host: &str, bus: &str, id: &[u8]) -> Vec<u8> {
        Card {
            library: library.to_string(),
            host: host.to_string(),
            bus: bus.to_string(),
            process: process(),
            ordinal: 3,
            id: id.to_vec(),
        }
        .encode()
    }

    fn error(cards: &[Vec<u8>], shared: bool) -> String {
        check(cards, shared).unwrap_err().to_string()
    }

    #[test]
    fn ranks_that_fit_have_the_id_of_the_first() {
        let id = std::array::from_fn(|i| i as u8);
        let one = card("NCCL 2.28.3", "a", "0000:17:00", &id);
        let two = card("NCCL 2.28.3", "a", "0000:3d:00", &[]);
        let three = Card {
            library: "NCCL 2.28.3".to_string(),
            host: "b".to_string(),
            bus: "0000:17:00".to_string(),
            process: "another".to_string(),
            ordinal: 5,
            id: Vec::new(),
        };
        let introduced = |devices: &[usize]| Introduced {
            id,
            devices: devices.to_vec(),
        };
        let three = three.encode();
        let all = check(&[one.clone(), two, three], false);
        assert_eq!(all, Ok(introduced(&[3, 3])), "the third is elsewhere");
        let again = card("NCCL 2.28.3", "a", "0000:17:00", &[]);
        let all = check(&[one.clone(), again.clone()], true);
        assert_eq!(all, Ok(introduced(&[3, 3])));
        let shared = error(&[one, again], false);
        assert!(
            shared.contains("ranks 0 and 1 have the same device, 0000:17:00 of host a"),
            "{shared}"
        );
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_rank() {
        let one = card("NCCL 2.28.3", "a", "1", &[7; ID_BYTES]);
        let other = card("NCCL 2.27.1", "b", "1", &[]);
        let text = error(&[one.clone(), one.clone(), other], true);
        assert!(
            text.contains("NCCL 2.28.3 on rank 0 and NCCL 2.27.1 on rank 2"),
            "{text}"
        );
        let text = error(&[one.clone(), b"rubbish".to_vec()], true);
        assert!(
            text.contains("what rank 1 says of itself cannot be read"),
            "{text}"
        );
        let text = error(&[card("NCCL 2.28.3", "a", "", &[1])], true);
        assert!(text.contains("rank 0 has sent no id"), "{text}");
    }
}
