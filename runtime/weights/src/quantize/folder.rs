//! The output as a Hugging Face folder.

use super::journal::{Finished, Journal};
use super::model::{Model, with_config};
use super::output::{Layout, Output, each, is_whole, lock};
use super::targets::{self, Target, Targets};
use super::way::{self, Beside};
use super::{MatrixError, QuantizeError, QuantizeEvent, QuantizeReport};
use crate::checkpoint::INDEX;
use crate::write::theirs;
use crate::{LayerReader, TensorRef, WeightsError};
use moesaic_spec::hf::{Scheme, SchemePart, SchemeTensor};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::UNIX_EPOCH;

/// The module that turns the last layer's output into logits.
const HEAD: &str = "lm_head";

type Watch<'a> = &'a (dyn Fn(QuantizeEvent<'_>) + Sync);

/// A tensor of an output file.
struct Entry<'a> {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: u64,
    from: From<'a>,
    /// The offset in the file.
    place: u64,
}

/// The origin of a tensor's bytes.
#[derive(Clone, Copy)]
enum From<'a> {
    Source(TensorRef<'a>),
    Part(usize, SchemePart),
}

/// A unit of work of one thread.
enum Work {
    /// Copies an entry.
    Copy(usize),
    /// Encodes a target, by its index, and writes its entries.
    Encode(usize),
}

/// Everything that writing a file needs.
struct Job<'a> {
    model: &'a Model,
    readers: &'a [LayerReader<'a>],
    targets: &'a Targets,
    watch: Watch<'a>,
}

/// Quantizes `model` into the folder `to`.
pub(super) fn write(
    model: &Model,
    to: &Path,
    scheme: Scheme,
    watch: Watch<'_>,
) -> Result<QuantizeReport, QuantizeError> {
    let readers = model.readers()?;
    let targets = targets::plan(model, scheme)?;
    let job = Job {
        model,
        readers: &readers,
        targets: &targets,
        watch,
    };
    let files = job.files()?;
    fs::create_dir_all(to).map_err(QuantizeError::write(to))?;
    let _lock = Lock::take(&to.join(".moesaic-quantize.lock"))?;
    let mut journal = Journal::open(to, &settings(&targets.scheme));
    let beside = job.beside(&files)?;
    way::check(to, &journal, &beside, |name| job.is_source(name, &journal))?;
    let bytes_before = model.bytes()?;
    watch(QuantizeEvent::Begins {
        bytes: bytes_before,
    });
    let mut report = QuantizeReport {
        bytes_before,
        ..QuantizeReport::default()
    };
    for (file, mut entries) in files {
        let layout = place(&mut entries);
        let finished = job.file(to, &file, &entries, &layout, &mut journal)?;
        report.matrices.extend(finished.matrices);
        report.bytes_after += layout.bytes;
    }
    beside.iter().try_for_each(|file| file.write(to))?;
    report.matrices.sort_by(|a, b| a.name.cmp(&b.name));
    let format = targets.scheme.stored.format.name;
    report
        .matrices
        .iter_mut()
        .for_each(|m| m.format = format.to_string());
    Ok(report)
}

/// Returns the settings of a run, as the record keeps them.
fn settings(scheme: &Scheme) -> String {
    format!("{} {:?}", scheme.name, scheme.stored.format.block)
}

impl<'a> Job<'a> {
    /// Returns the entries of each file of the output, which has the names of the source's files.
    fn files(&self) -> Result<BTreeMap<String, Vec<Entry<'a>>>, QuantizeError> {
        let mut files = BTreeMap::<String, Vec<Entry<'a>>>::new();
        for name in self.model.checkpoint.names() {
            let found = self.model.checkpoint.find(name)?;
            let Some(tensor) = found.filter(|_| !self.replaces(name)) else {
                continue;
            };
            let entry = Entry {
                name: name.to_string(),
                dtype: dtype(&tensor),
                shape: tensor.shape.to_vec(),
                bytes: tensor.bytes.len() as u64,
                from: From::Source(tensor),
                place: 0,
            };
            files
                .entry(self.short(tensor.file))
                .or_default()
                .push(entry);
        }
        for (at, target) in self.targets.list.iter().enumerate() {
            let entries = files.entry(self.short(&target.file)).or_default();
            entries.extend(self.parts(target)?.into_iter().map(|tensor| Entry {
                bytes: tensor.shape.iter().product::<usize>() as u64 * size_of_dtype(tensor.dtype),
                name: tensor.name,
                dtype: tensor.dtype.to_string(),
                shape: tensor.shape,
                from: From::Part(at, tensor.part),
                place: 0,
            }));
        }
        check_names(&files)?;
        Ok(files)
    }

    /// Returns true if a file of the output was made from the source's file as it is now.
    fn is_source(&self, name: &str, journal: &Journal) -> bool {
        let known = journal.files.get(name);
        known.is_some_and(|known| known.source == identity(&self.model.folder.join(name)))
    }

    fn replaces(&self, name: &str) -> bool {
        let replaced = &self.targets.replaced;
        replaced
            .binary_search_by(|other| other.as_str().cmp(name))
            .is_ok()
    }

    fn parts(&self, target: &Target) -> Result<Vec<SchemeTensor>, QuantizeError> {
        let scheme = &self.targets.scheme;
        let parts = scheme.tensors(&target.name, target.matrices.len(), target.size);
        parts.ok_or_else(|| QuantizeError::Unsupported {
            tensor: target.name.clone(),
            layer: self.model.layers[target.layer].import.spec.name.clone(),
            reason: format!("{} has no name for its scales", scheme.name),
        })
    }

    /// Returns the path of a source's file below its folder.
    fn short(&self, file: &Path) -> String {
        let below = file.strip_prefix(&self.model.folder).unwrap_or(file);
        below.to_string_lossy().into_owned()
    }

    /// Writes a file, or checks the one that an earlier run finished.
    fn file(
        &self,
        to: &Path,
        name: &str,
        entries: &[Entry<'a>],
        layout: &Layout,
        journal: &mut Journal,
    ) -> Result<Finished, QuantizeError> {
        let path = to.join(name);
        if path.exists() {
            let places: Vec<(u64, u64)> = entries.iter().map(|e| (e.place, e.bytes)).collect();
            let known = journal.files.get(name);
            let known = known.filter(|_| self.is_source(name, journal));
            let whole = known.map_or(Ok(false), |known| {
                is_whole(&path, layout, &places, known.checksum)
            });
            return match (known, whole.map_err(WeightsError::io(&path))?) {
                (Some(known), true) => {
                    (self.watch)(QuantizeEvent::Kept { file: name });
                    let bytes = self.source_bytes(entries);
                    (self.watch)(QuantizeEvent::Done { bytes });
                    Ok(known.clone())
                }
                _ => Err(QuantizeError::InTheWay { path }),
            };
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(QuantizeError::write(folder))?;
        }
        let output = Output::create(&path, layout)?;
        let matrices = self.fill(&output, entries)?;
        // The record comes first: a file without one would be in the way of the next run.
        let finished = Finished {
            checksum: output.checksum(),
            source: identity(&self.model.folder.join(name)),
            matrices,
        };
        journal.add(name, finished.clone())?;
        output.finish()?;
        (self.watch)(QuantizeEvent::Written {
            file: name,
            bytes: layout.bytes,
        });
        Ok(finished)
    }

    /// Writes the tensors of a file. Returns the errors of its matrices.
    fn fill(
        &self,
        output: &Output,
        entries: &[Entry<'a>],
    ) -> Result<Vec<MatrixError>, QuantizeError> {
        let mut parts = BTreeMap::<usize, Vec<&Entry<'a>>>::new();
        let mut work = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            match entry.from {
                From::Source(_) => work.push(Work::Copy(at)),
                From::Part(target, _) => parts.entry(target).or_default().push(entry),
            }
        }
        work.extend(parts.keys().map(|target| Work::Encode(*target)));
        let matrices = Mutex::new(Vec::new());
        each(work, self.watch, |work| match work {
            Work::Copy(at) => copy(output, &entries[*at]),
            Work::Encode(at) => {
                let target = &self.targets.list[*at];
                let reader = &self.readers[target.layer];
                let (bytes, squares) = target.encode(&self.targets.scheme, reader)?;
                for entry in &parts[at] {
                    let From::Part(_, part) = entry.from else {
                        continue;
                    };
                    let own = bytes.get(&part).map_or(&[][..], Vec::as_slice);
                    output.put(entry.place, own)?;
                }
                lock(&matrices).push(MatrixError {
                    name: target.name.clone(),
                    format: String::new(),
                    relative_rms: squares.relative_rms(),
                });
                Ok(self.bytes_of(target))
            }
        })?;
        Ok(std::mem::take(&mut *lock(&matrices)))
    }

    /// Returns the source's bytes that a target is made from.
    fn bytes_of(&self, target: &Target) -> u64 {
        let elements = target.matrices.len() * target.size[0] * target.size[1];
        let name = target.name.strip_suffix("_blocks").unwrap_or(&target.name);
        let tensor = self.model.checkpoint.tensor(name);
        let size = tensor.map_or(2, |tensor| {
            tensor.bytes.len() / tensor.shape.iter().product::<usize>().max(1)
        });
        (elements * size) as u64
    }

    /// Returns the source's bytes behind the entries of a file.
    fn source_bytes(&self, entries: &[Entry<'a>]) -> u64 {
        let bytes = entries.iter().map(|entry| match entry.from {
            From::Source(_) => entry.bytes,
            From::Part(target, SchemePart::Codes) => self.bytes_of(&self.targets.list[target]),
            From::Part(..) => 0,
        });
        bytes.sum()
    }

    /// Returns the files beside those with tensors, config.json last: a folder without it is no
    /// model.
    fn beside(
        &self,
        files: &BTreeMap<String, Vec<Entry<'a>>>,
    ) -> Result<Vec<Beside>, QuantizeError> {
        let mut beside = way::others(&self.model.folder)?;
        let entries = || {
            files
                .iter()
                .flat_map(|(file, all)| all.iter().map(move |entry| (file, entry)))
        };
        if self.model.folder.join(INDEX).exists() {
            let map = entries().map(|(file, entry)| (entry.name.clone(), json!(file)));
            let map: Map<String, Value> = map.collect();
            let total: u64 = entries().map(|(_, entry)| entry.bytes).sum();
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            beside.push(Beside::text(INDEX, format!("{index:#}\n")));
        }
        let kept = self.kept();
        let mut quantization = self.targets.scheme.config(&kept);
        // compressed-tensors matches the names of modules, and transformers calls the `shared_expert`
        // and the `shared_mlp` of some families' files `shared_experts`.
        if let Some(ignore) = quantization.get_mut("ignore").and_then(Value::as_array_mut)
            && kept.iter().any(|name| name.contains(".share"))
        {
            ignore.push(json!("re:.*[.]shared?_.*"));
        }
        let config = with_config(&self.model.config, &quantization);
        beside.push(Beside::text("config.json", config));
        Ok(beside)
    }

    /// Returns the modules whose matrices stay floats.
    fn kept(&self) -> Vec<String> {
        let names = self.model.checkpoint.names();
        let kept = names.filter(|name| !self.replaces(name));
        let matrices = kept.filter(|name| {
            let tensor = self.model.checkpoint.tensor(name);
            tensor.is_some_and(|tensor| tensor.shape.len() > 1)
        });
        let modules = matrices.filter_map(|name| name.strip_suffix(".weight"));
        let mut modules: Vec<String> = modules.map(str::to_string).collect();
        // A head that is the embedding is no tensor of the file, but a module of the model.
        if !modules.iter().any(|name| name.ends_with(HEAD)) {
            modules.push(HEAD.to_string());
        }
        modules
    }
}

fn copy(output: &Output, entry: &Entry<'_>) -> Result<u64, QuantizeError> {
    if let From::Source(tensor) = entry.from {
        tensor.check_length()?;
        output.put(entry.place, tensor.bytes)?;
    }
    Ok(entry.bytes)
}

/// Orders the tensors as the safetensors library does, by element size so that all are aligned, and
/// gives them their places.
fn place(entries: &mut [Entry<'_>]) -> Layout {
    let key = |entry: &Entry<'_>| {
        (
            std::cmp::Reverse(size_of_dtype(&entry.dtype)),
            entry.name.clone(),
        )
    };
    entries.sort_by_cached_key(key);
    let (mut header, mut end) = (Map::new(), 0);
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    for entry in entries.iter_mut() {
        let start = end;
        end += entry.bytes;
        entry.place = start;
        let value = json!({
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [start, end],
        });
        header.insert(entry.name.clone(), value);
    }
    let mut text = Value::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let header = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let before = header.len() as u64;
    entries.iter_mut().for_each(|entry| entry.place += before);
    Layout {
        header,
        bytes: before + end,
    }
}

fn dtype(tensor: &TensorRef<'_>) -> String {
    match tensor.dtype {
        Ok(dtype) => format!("{:?}", theirs(dtype)),
        Err(other) => format!("{other:?}"),
    }
}

/// Returns the bytes of an element, by the bits in the type's name.
fn size_of_dtype(name: &str) -> u64 {
    let digits = |name: &str| -> Option<u64> {
        let start = name.find(|c: char| c.is_ascii_digit())?;
        let rest = &name[start..];
        let end = rest.find(|c: char| !c.is_ascii_digit());
        rest[..end.unwrap_or(rest.len())].parse().ok()
    };
    digits(name).map_or(1, |bits| (bits / 8).max(1))
}

/// Returns the size and the time of a file, by which a change is noticed.
fn identity(file: &Path) -> String {
    let Ok(about) = fs::metadata(file) else {
        return String::new();
    };
    let time = about.modified().ok();
    let time = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} {}", about.len(), time.map_or(0, |time| time.as_nanos()))
}

/// Refuses a source that already has a tensor of a name that codes or scales would get.
fn check_names(files: &BTreeMap<String, Vec<Entry<'_>>>) -> Result<(), QuantizeError> {
    let mut names = BTreeSet::new();
    let mut all = files.values().flatten();
    let twice = all.find(|entry| !names.insert(entry.name.as_str()));
    twice.map_or(Ok(()), |entry| {
        Err(QuantizeError::Unsupported {
            tensor: entry.name.clone(),
            layer: "the model".to_string(),
            reason: "the checkpoint has another tensor of that name".to_string(),
        })
    })
}

/// A lock that keeps a second process away from an output.
pub(super) struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    pub fn take(path: &Path) -> Result<Lock, QuantizeError> {
        let file = File::create(path).map_err(QuantizeError::write(path))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock {
                path: path.to_path_buf(),
                _file: file,
            }),
            Err(fs::TryLockError::WouldBlock) => Err(QuantizeError::Busy {
                path: path.parent().unwrap_or(path).to_path_buf(),
            }),
            Err(fs::TryLockError::Error(error)) => Err(QuantizeError::write(path)(error)),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
