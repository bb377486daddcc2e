//! Safetensors written a piece at a time.

use crate::WeightsError;
use crate::checkpoint::{INDEX, SINGLE};
use crate::write::{permitted, theirs};
use moesaic_tensor::{Described, SourceError, WeightSink};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Writes tensors that are not in memory all at once: to one file, or to a directory
/// with an index and files of bounded size, as [`Checkpoint`](crate::Checkpoint) opens
/// both. Names are given when everything has been written, that of the index last; before
/// that there are temporary files, which go away with the writer.
pub struct Writer {
    to: To,
    files: VecDeque<Part>,
    done: Vec<Part>,
}

enum To {
    File(PathBuf),
    Directory { path: PathBuf, most: u64 },
}

/// A file on its way.
struct Part {
    name: String,
    file: NamedTempFile,
    tensors: Vec<String>,
    left: u64,
}

impl Writer {
    /// Writes one file.
    pub fn file(path: impl AsRef<Path>) -> Writer {
        Writer::to(To::File(path.as_ref().to_path_buf()))
    }

    /// Writes files with elements of at most `most` bytes, larger tensors aside, and an
    /// index if it is more than one. The directory is made if it is not there. It is the
    /// new checkpoint's then, but files of an earlier one that had more of them stay.
    pub fn directory(path: impl AsRef<Path>, most: u64) -> Writer {
        let path = path.as_ref().to_path_buf();
        Writer::to(To::Directory { path, most })
    }

    fn to(to: To) -> Writer {
        Writer {
            to,
            files: VecDeque::new(),
            done: Vec::new(),
        }
    }

    fn folder(&self) -> &Path {
        match &self.to {
            To::Directory { path, .. } => path,
            To::File(path) => {
                let folder = path
                    .parent()
                    .filter(|folder| !folder.as_os_str().is_empty());
                folder.unwrap_or(Path::new("."))
            }
        }
    }

    /// The next file, if bytes are still to come.
    fn advance(&mut self) -> Result<Option<&mut Part>, SourceError> {
        while self.files.front().is_some_and(|part| part.left == 0) {
            if let Some(part) = self.files.pop_front() {
                part.file.as_file().sync_all()?;
                self.done.push(part);
            }
        }
        Ok(self.files.front_mut())
    }

    /// Names the files, the index last.
    fn publish(&mut self) -> Result<(), SourceError> {
        let parts = std::mem::take(&mut self.done);
        let folder = match &self.to {
            To::Directory { path, .. } => path.clone(),
            To::File(path) => {
                let path = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
                for part in parts {
                    part.file.persist(&path)?;
                }
                return Ok(());
            }
        };
        let mut map = BTreeMap::new();
        let several = parts.len() > 1;
        for part in parts {
            for tensor in part.tensors {
                map.insert(tensor, part.name.clone());
            }
            part.file.persist(folder.join(&part.name))?;
        }
        let stale = if several { SINGLE } else { INDEX };
        if several {
            let index = serde_json::json!({ "metadata": {}, "weight_map": map });
            crate::write_whole(&folder.join(INDEX), index.to_string().as_bytes())?;
        }
        match fs::remove_file(folder.join(stale)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl WeightSink for Writer {
    fn begin(&mut self, tensors: &[Described]) -> Result<(), SourceError> {
        let most = match &self.to {
            To::File(_) => u64::MAX,
            To::Directory { path, most } => {
                fs::create_dir_all(path).map_err(WeightsError::io(path))?;
                *most
            }
        };
        let groups = grouped(tensors, most);
        let count = groups.len();
        for (number, group) in groups.into_iter().enumerate() {
            let (header, left) = header(group)?;
            let mut file = permitted(self.folder()).map_err(WeightsError::io(self.folder()))?;
            file.write_all(&header)?;
            let name = match count {
                1 => SINGLE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            self.files.push_back(Part {
                name,
                file,
                tensors: group.iter().map(|tensor| tensor.name.clone()).collect(),
                left,
            });
        }
        Ok(())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), SourceError> {
        while !bytes.is_empty() {
            let Some(part) = self.advance()? else {
                return Err("more bytes came than the tensors have".into());
            };
            let now = bytes
                .len()
                .min(usize::try_from(part.left).unwrap_or(usize::MAX));
            part.file.write_all(&bytes[..now])?;
            part.left -= now as u64;
            bytes = &bytes[now..];
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), SourceError> {
        if let Some(part) = self.advance()? {
            let left = part.left;
            return Err(format!("{left} bytes of `{}` have not come", part.name).into());
        }
        self.publish()
    }
}

fn bytes(tensor: &Described) -> Option<u64> {
    let sizes = tensor.shape.iter().map(|size| *size as u64);
    let elements = sizes.into_iter().try_fold(1u64, u64::checked_mul)?;
    elements.checked_mul(tensor.dtype.size() as u64)
}

/// Tensors of a file each, in their order.
fn grouped(tensors: &[Described], most: u64) -> Vec<&[Described]> {
    let (mut groups, mut first, mut sum) = (Vec::new(), 0, 0u64);
    for (at, tensor) in tensors.iter().enumerate() {
        let size = bytes(tensor).unwrap_or(u64::MAX);
        if at > first && sum.saturating_add(size) > most {
            groups.push(&tensors[first..at]);
            (first, sum) = (at, 0);
        }
        sum = sum.saturating_add(size);
    }
    groups.push(&tensors[first..]);
    groups
}

/// The beginning of a file, and how many bytes of elements follow.
fn header(tensors: &[Described]) -> Result<(Vec<u8>, u64), SourceError> {
    let mut entries = serde_json::Map::new();
    let mut end = 0u64;
    for tensor in tensors {
        let start = end;
        let next = bytes(tensor).and_then(|size| start.checked_add(size));
        end = next.ok_or_else(|| format!("`{}` is larger than any file", tensor.name))?;
        let entry = serde_json::json!({
            "dtype": theirs(tensor.dtype),
            "shape": tensor.shape,
            "data_offsets": [start, end],
        });
        if entries.insert(tensor.name.clone(), entry).is_some() {
            return Err(format!("there are two tensors `{}`", tensor.name).into());
        }
    }
    let mut text = serde_json::Value::Object(entries).to_string();
    // Elements begin where those of any type may lie.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(text.as_bytes());
    Ok((header, end))
}
