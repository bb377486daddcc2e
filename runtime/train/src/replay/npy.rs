//! NumPy's format of one array, as far as records of integers need it: versions 1 to 3, little
//! endian, in C order ([source](https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)).

use super::{IdType, RecordShape, ReplayError};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Headers are padded so that elements begin at a multiple of this.
const ALIGNMENT: usize = 64;

/// A header, and the bytes of the elements behind it.
pub(super) struct Array<'b> {
    pub(super) element: Element,
    pub(super) shape: Vec<usize>,
    pub(super) data: &'b [u8],
}

/// The integers that ids are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    U8,
    U16,
    I8,
    I16,
    I32,
    I64,
}

impl Element {
    /// Returns the type of a `descr`, of which one-byte types may leave the byte order open.
    fn named(descr: &str) -> Option<Element> {
        Some(match descr {
            "|u1" | "<u1" => Element::U8,
            "|i1" | "<i1" => Element::I8,
            "<u2" => Element::U16,
            "<i2" => Element::I16,
            "<i4" => Element::I32,
            "<i8" => Element::I64,
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::I8 => 1,
            Element::U16 | Element::I16 => 2,
            Element::I32 => 4,
            Element::I64 => 8,
        }
    }

    /// Reads one element of [`bytes`](Element::bytes) bytes.
    pub(super) fn value(self, bytes: &[u8]) -> i64 {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        let bits = i64::from_le_bytes(whole);
        match self {
            Element::U8 | Element::U16 | Element::I64 => bits,
            Element::I8 => i64::from(bits as i8),
            Element::I16 => i64::from(bits as i16),
            Element::I32 => i64::from(bits as i32),
        }
    }
}

/// Reads an array whose bytes are all there.
pub(super) fn read(bytes: &[u8]) -> Result<Array<'_>, ReplayError> {
    let format = |problem: &str| ReplayError::Format(problem.to_string());
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| format("it does not begin as an .npy file"))?;
    let cut = || format("it ends within the header");
    let (&[major, _minor], rest) = rest.split_first_chunk().ok_or_else(cut)?;
    let (length, rest) = match major {
        1 => {
            let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
            (usize::from(u16::from_le_bytes(*length)), rest)
        }
        2 | 3 => {
            let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
            (u32::from_le_bytes(*length) as usize, rest)
        }
        _ => return Err(ReplayError::Format(format!("its version is {major}"))),
    };
    let (header, data) = rest.split_at_checked(length).ok_or_else(cut)?;
    let header = std::str::from_utf8(header).map_err(|_| format("its header is not text"))?;
    let array = Array {
        element: element(header)?,
        shape: shape(header)?,
        data,
    };
    match value(header, "fortran_order")?.split([',', '}']).next() {
        Some("False") => {}
        _ => return Err(format("its order is not C's; save `np.ascontiguousarray`")),
    }
    let mut sizes = array.shape.iter();
    let element = array.element.bytes();
    let wanted = sizes.try_fold(element, |all, &size| all.checked_mul(size));
    if wanted == Some(data.len()) {
        return Ok(array);
    }
    let (shape, found) = (&array.shape, data.len());
    Err(ReplayError::Format(format!(
        "{found} bytes follow its header, which is not what {shape:?} needs"
    )))
}

/// Returns the text behind a key of the header's dictionary.
fn value<'h>(header: &'h str, key: &str) -> Result<&'h str, ReplayError> {
    let missing = || ReplayError::Format(format!("its header has no `{key}`"));
    let (_, rest) = header.split_once(&format!("'{key}'")).ok_or_else(missing)?;
    Ok(rest
        .trim_start()
        .strip_prefix(':')
        .ok_or_else(missing)?
        .trim_start())
}

fn element(header: &str) -> Result<Element, ReplayError> {
    let text = value(header, "descr")?;
    let descr = text
        .strip_prefix('\'')
        .and_then(|text| text.split_once('\''));
    let descr = descr.map_or(text, |(descr, _)| descr);
    Element::named(descr).ok_or_else(|| {
        ReplayError::Format(format!(
            "its elements are {descr:?}; ids are u1, u2, i1, i2, i4 or i8, little endian"
        ))
    })
}

fn shape(header: &str) -> Result<Vec<usize>, ReplayError> {
    let text = value(header, "shape")?;
    let inside = text.strip_prefix('(').and_then(|text| text.split_once(')'));
    let sizes = inside.and_then(|(sizes, _)| {
        let sizes = sizes
            .split(',')
            .map(str::trim)
            .filter(|size| !size.is_empty());
        sizes.map(|size| size.parse().ok()).collect()
    });
    sizes.ok_or_else(|| ReplayError::Format("its header has no shape of sizes".to_string()))
}

/// Writes ids that fit into the type.
pub(super) fn write(ids: &[i32], shape: RecordShape, element: IdType) -> Vec<u8> {
    let descr = match element {
        IdType::U8 => "|u1",
        IdType::U16 => "<u2",
        IdType::I32 => "<i4",
    };
    let RecordShape {
        tokens,
        layers,
        top_k,
    } = shape;
    let mut header = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({tokens}, {layers}, {top_k}), }}"
    );
    // Magic, version, length and the line's end.
    let before = MAGIC.len() + 2 + 2;
    let whole = (before + header.len() + 1).next_multiple_of(ALIGNMENT);
    header.push_str(&" ".repeat(whole - before - header.len() - 1));
    header.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    for &id in ids {
        match element {
            IdType::U8 => bytes.push(id as u8),
            IdType::U16 => bytes.extend((id as u16).to_le_bytes()),
            IdType::I32 => bytes.extend(id.to_le_bytes()),
        }
    }
    bytes
}
