//! Writes safetensors a few bytes at a time.

use crate::WeightsError;
use crate::checkpoint::{INDEX, SINGLE, inside, read_index};
use crate::write::{permitted, theirs};
use moesaic_tensor::{Described, SourceError, WeightSink};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A writer of tensors that are not all in memory. It writes one file, or a directory with an index
/// and files of bounded size; [`Checkpoint`](crate::Checkpoint) opens both.
///
/// The final names appear when everything has been written. Before that there are temporary files,
/// which disappear with the writer. An earlier checkpoint in the same place keeps its names: one
/// atomic step switches readers to the new one, and only then are the old files removed. So a
/// process that ends at any point leaves one of the two, whole.
pub struct Writer {
    to: To,
    files: VecDeque<Part>,
    done: Vec<Part>,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("to", &self.to)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum To {
    File(PathBuf),
    Directory { path: PathBuf, most: u64 },
}

/// A file being written.
struct Part {
    file: NamedTempFile,
    tensors: Vec<String>,
    left: u64,
}

impl Writer {
    /// Returns a writer of one file.
    pub fn file(path: impl AsRef<Path>) -> Writer {
        Writer::to(To::File(path.as_ref().to_path_buf()))
    }

    /// Returns a writer of files with at most `most` bytes of elements each, except for larger
    /// tensors, and an index if there are several. It makes the directory if needed. The new
    /// checkpoint takes the directory over: files named by an earlier index are removed.
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

    /// Returns the next file, if bytes are still to come.
    fn advance(&mut self) -> Result<Option<&mut Part>, SourceError> {
        while self.files.front().is_some_and(|part| part.left == 0) {
            if let Some(part) = self.files.pop_front() {
                // Data must be on disk before a rename makes it visible, or a power cut could leave
                // an empty file under the name.
                part.file.as_file().sync_all()?;
                self.done.push(part);
            }
        }
        Ok(self.files.front_mut())
    }

    /// Gives the files their names.
    fn publish(&mut self) -> Result<(), SourceError> {
        self.acts()?.into_iter().try_for_each(Act::done)
    }

    /// Returns the final acts after everything has been written. Readers see the earlier checkpoint
    /// until one of these acts is done, and the new one from then on.
    fn acts(&mut self) -> Result<Vec<Act>, SourceError> {
        let parts = std::mem::take(&mut self.done);
        let folder = match &self.to {
            To::Directory { path, .. } => path.clone(),
            To::File(path) => {
                // Follow a link, so that it keeps pointing to the new file.
                let path = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
                let name = |part: Part| Act::Name(part.file, path.clone());
                return Ok(parts.into_iter().map(name).collect());
            }
        };
        let index = folder.join(INDEX);
        let several = parts.len() > 1;
        let names = if several {
            free_names(&folder, parts.len())
        } else {
            vec![SINGLE.to_string()]
        };
        // An unreadable index names no files that could safely be removed.
        let old = read_index(&index).unwrap_or_default().into_iter();
        let old: BTreeSet<PathBuf> = old
            .filter_map(|(_, file)| inside(&folder, &index, &file).ok())
            // The new checkpoint may be that file itself.
            .filter(|file| *file != folder.join(SINGLE))
            .collect();
        let (mut acts, mut map) = (Vec::new(), BTreeMap::new());
        for (part, name) in parts.into_iter().zip(names) {
            map.extend(
                part.tensors
                    .into_iter()
                    .map(|tensor| (tensor, name.clone())),
            );
            acts.push(Act::Name(part.file, folder.join(name)));
        }
        // All files must have their names before the index refers to them.
        acts.push(Act::Settle(folder.clone()));
        if several {
            let json = serde_json::json!({ "metadata": {}, "weight_map": map });
            acts.push(Act::Write(index, json.to_string()));
            // A single file takes precedence over an index when reading, so it must go.
            acts.push(Act::Remove(folder.join(SINGLE)));
        } else {
            acts.push(Act::Remove(index));
        }
        // The switch must be on disk before old files go.
        acts.push(Act::Settle(folder));
        acts.extend(old.into_iter().map(Act::Remove));
        Ok(acts)
    }
}

/// An atomic act of publishing a checkpoint.
enum Act {
    /// Renames a written file to its name.
    Name(NamedTempFile, PathBuf),
    /// Writes a file in one piece.
    Write(PathBuf, String),
    /// Removes a file, which may be missing.
    Remove(PathBuf),
    /// Flushes a folder to disk before the next act, on systems that can.
    Settle(PathBuf),
}

impl Act {
    fn done(self) -> Result<(), SourceError> {
        match self {
            Act::Name(file, path) => {
                file.persist(path)?;
            }
            Act::Write(path, text) => crate::write_whole(&path, text.as_bytes())?,
            Act::Remove(path) => match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            },
            // Not every file system can sync a folder, and an error here loses nothing in the
            // normal case.
            Act::Settle(folder) => {
                let _ = fs::File::open(folder).and_then(|folder| folder.sync_all());
            }
        }
        Ok(())
    }
}

/// Returns `count` file names that do not exist yet.
fn free_names(folder: &Path, count: usize) -> Vec<String> {
    let name = |number: usize, again: usize| match again {
        0 => format!("model-{number:05}-of-{count:05}.safetensors"),
        _ => format!("model-{number:05}-of-{count:05}-{again}.safetensors"),
    };
    // Names of an earlier checkpoint must stay as they are until readers have switched, so never
    // reuse one.
    let free = |again: &usize| {
        let mut files = (1..=count).map(|number| folder.join(name(number, *again)));
        !files.any(|file| file.symlink_metadata().is_ok())
    };
    let again = (0..).find(free).unwrap_or_default();
    (1..=count).map(|number| name(number, again)).collect()
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
        for group in groups {
            let (header, left) = header(group)?;
            let mut file = permitted(self.folder()).map_err(WeightsError::io(self.folder()))?;
            file.write_all(&header)?;
            self.files.push_back(Part {
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
            let (left, last) = (part.left, part.tensors.last());
            let last = last.map_or("", String::as_str);
            return Err(format!("{left} bytes up to the end of `{last}` have not come").into());
        }
        self.publish()
    }
}

fn bytes(tensor: &Described) -> Option<u64> {
    let sizes = tensor.shape.iter().map(|size| *size as u64);
    let elements = sizes.into_iter().try_fold(1u64, u64::checked_mul)?;
    elements.checked_mul(tensor.dtype.size() as u64)
}

/// Groups the tensors into files, in their order.
fn grouped(tensors: &[Described], most: u64) -> Vec<&[Described]> {
    let (mut groups, mut first, mut sum) = (Vec::new(), 0, 0u64);
    for (at, tensor) in tensors.iter().enumerate() {
        let size = bytes(tensor).unwrap_or(u64::MAX);
        // A tensor larger than the limit gets a file of its own.
        if at > first && sum.saturating_add(size) > most {
            groups.push(&tensors[first..at]);
            (first, sum) = (at, 0);
        }
        sum = sum.saturating_add(size);
    }
    groups.push(&tensors[first..]);
    groups
}

/// Returns the start of a file, and the number of element bytes that follow.
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
    // Pad the header so that elements of any type are aligned.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(text.as_bytes());
    Ok((header, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;
    use moesaic_kernel::DType;

    /// Writes four tensors of 32 bytes, each filled with one number.
    fn written(folder: &Path, most: u64, number: u8) -> Writer {
        let tensor = |at: usize| Described {
            name: format!("tensor{at}"),
            dtype: DType::F32,
            shape: vec![8],
        };
        let mut writer = Writer::directory(folder, most);
        let tensors: Vec<Described> = (0..4).map(tensor).collect();
        writer.begin(&tensors).unwrap();
        writer.write(&[number; 128]).unwrap();
        assert!(writer.advance().unwrap().is_none());
        writer
    }

    /// Returns the number that fills all tensors of the current checkpoint.
    fn whole(folder: &Path) -> u8 {
        let checkpoint = Checkpoint::open(folder).unwrap();
        assert_eq!(checkpoint.names().count(), 4);
        let mut all = (0..4).flat_map(|at| {
            let tensor = checkpoint.tensor(&format!("tensor{at}")).unwrap();
            tensor.bytes.to_vec()
        });
        let number = all.next().unwrap();
        assert!(all.all(|byte| byte == number), "parts of two checkpoints");
        number
    }

    /// Ends the process after each act, over a checkpoint of each form.
    #[test]
    fn who_ends_on_the_way_leaves_one_of_two_checkpoints() {
        for (old, new) in [
            (64, 64),
            (64, 32),
            (32, 64),
            (64, 200),
            (200, 64),
            (200, 200),
        ] {
            let mut acts = 0;
            loop {
                let folder = tempfile::tempdir().unwrap();
                written(folder.path(), old, 1).publish().unwrap();
                let all = written(folder.path(), new, 2).acts().unwrap();
                let count = all.len();
                let mut seen = vec![whole(folder.path())];
                for act in all.into_iter().take(acts) {
                    act.done().unwrap();
                    seen.push(whole(folder.path()));
                }
                assert!(seen.is_sorted(), "{old} to {new}: {seen:?}");
                assert_eq!(seen.last() == Some(&2), seen.contains(&2));
                // The next writer copes with the leftovers.
                written(folder.path(), new, 3).publish().unwrap();
                assert_eq!(whole(folder.path()), 3, "{old} to {new}");
                if acts == count {
                    assert_eq!(seen.last(), Some(&2));
                    break;
                }
                acts += 1;
            }
        }
    }

    /// Repeated writes to one place leave no more files than one checkpoint has.
    #[test]
    fn files_of_earlier_checkpoints_go() {
        let folder = tempfile::tempdir().unwrap();
        for (number, most) in [64, 64, 32, 200, 64, 64].into_iter().enumerate() {
            written(folder.path(), most, number as u8)
                .publish()
                .unwrap();
            assert_eq!(whole(folder.path()), number as u8);
            let files = fs::read_dir(folder.path()).unwrap().count();
            let parts = 128usize.div_ceil(most as usize);
            assert_eq!(files, parts + usize::from(parts > 1), "{most}");
        }
    }
}
