//! Safetensors files mapped into memory.

use crate::gguf::{self, Gguf};
use crate::gguf_header::Kind;
use crate::regular;
use crate::{Damage, WeightsError};
use moesaic_kernel::DType;
use moesaic_spec::hf::parse_json;
use moesaic_tensor::{Bytes, Map, SourceError, Tensor, Tensors, WeightSource};
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a file or a model directory, mapped into memory.
///
/// Opening reads the header of a single file, or the index of several. A shard is opened when you
/// ask for a tensor in it, so the shards of other layers may be missing.
///
/// Do not truncate the files while a checkpoint or a tensor from it is alive, because the system
/// ends a process that reads past the end. A length check before each read turns an earlier
/// truncation into an error; nothing can catch one during a read. To replace a file, rename another
/// onto it: the open checkpoint keeps the old one.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    shards: Vec<LazyShard>,
    /// The shard of each tensor, by name.
    names: BTreeMap<String, usize>,
    /// The GGUF files, in place of both.
    gguf: Option<Gguf>,
}

/// A file that is opened when a tensor in it is first needed.
#[derive(Debug)]
struct LazyShard {
    file: PathBuf,
    /// Only success is kept, so a later call retries after an error.
    opened: OnceLock<Shard>,
}

#[derive(Debug)]
struct Shard {
    file: PathBuf,
    map: Arc<Map>,
    metadata: Metadata,
    /// The offset of the elements.
    data: usize,
}

/// A tensor of a checkpoint, not copied.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    /// The name in the file.
    pub name: &'a str,
    /// The file.
    pub file: &'a Path,
    /// The element type, or its name in the file if moesaic does not support it.
    pub dtype: Result<DType, safetensors::Dtype>,
    /// Sizes, outermost first; row major.
    pub shape: &'a [usize],
    /// The elements, little endian and of any alignment.
    pub bytes: &'a [u8],
    map: &'a Arc<Map>,
    /// The offset of the elements in the file.
    start: usize,
    /// GGUF's type, if it is blocks of codes or unsupported.
    pub(crate) ggml: Option<Kind>,
}

impl TensorRef<'_> {
    /// Returns the tensor, whose bytes stay in the file.
    ///
    /// # Errors
    ///
    /// The name of an unsupported element type.
    pub fn tensor(&self) -> Result<Tensor<'static>, safetensors::Dtype> {
        Ok(Tensor {
            dtype: self.dtype?,
            shape: self.shape.to_vec(),
            data: self.data(0..self.bytes.len()),
        })
    }

    /// Checks that the file still contains it, because the system ends a process that reads past
    /// the end of a truncated file.
    pub(crate) fn check_length(&self) -> Result<(), WeightsError> {
        match self.map.is_whole() {
            Ok(true) => Ok(()),
            Ok(false) => Err(WeightsError::Corrupt {
                file: self.file.to_path_buf(),
                reason: Damage::Shrunk,
            }),
            Err(error) => Err(WeightsError::io(self.file)(error)),
        }
    }

    /// Returns some of its bytes, which stay in the file.
    pub(crate) fn data(&self, part: Range<usize>) -> Bytes<'static> {
        Bytes::mapped(self.map, self.start + part.start..self.start + part.end)
    }
}

impl Checkpoint {
    /// Opens a safetensors file, or a directory with `model.safetensors` or
    /// `model.safetensors.index.json` and its shards.
    ///
    /// # Errors
    ///
    /// [`WeightsError::NotFound`], [`WeightsError::NoWeights`], [`WeightsError::Io`], or
    /// [`WeightsError::Corrupt`] for a file that is truncated or has an invalid header. Problems
    /// with one of several shards show in [`Checkpoint::find`].
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, WeightsError> {
        let path = path.as_ref();
        let about = fs::metadata(path).map_err(WeightsError::io(path))?;
        let mut checkpoint = Checkpoint {
            path: path.to_path_buf(),
            shards: Vec::new(),
            names: BTreeMap::new(),
            gguf: None,
        };
        if let Some(path) = gguf_of(path) {
            checkpoint.gguf = Some(Gguf::open(&path)?);
        } else if !about.is_dir() {
            checkpoint.add_whole(path.to_path_buf())?;
        // The order of transformers: a single file wins over an index.
        } else if path.join(SINGLE).exists() {
            checkpoint.add_whole(path.join(SINGLE))?;
        } else if path.join(INDEX).exists() {
            checkpoint.add_indexed(path)?;
        } else {
            return Err(no_weights(path));
        }
        Ok(checkpoint)
    }

    /// Returns the files that [`Checkpoint::open`] reads for a path, whether they exist or not.
    /// Writing to one of them changes the checkpoint.
    pub fn files_of(path: &Path) -> Vec<PathBuf> {
        if let Some(path) = gguf_of(path) {
            return gguf::files_of(&path);
        }
        if !path.is_dir() {
            return vec![path.to_path_buf()];
        }
        let index = path.join(INDEX);
        let named = read_index(&index).unwrap_or_default().into_iter();
        let named: BTreeSet<PathBuf> = named
            .filter_map(|(_, file)| inside(path, &index, &file).ok())
            .collect();
        [path.join(SINGLE), index]
            .into_iter()
            .chain(named)
            .collect()
    }

    /// Returns the text under a key in the metadata of the (first) file, as
    /// [`write_safetensors_noted`](crate::write_safetensors_noted) wrote it.
    pub fn noted(&self, key: &str) -> Option<&str> {
        let all = self.shards.first()?.open().ok()?.metadata.metadata();
        let all = all.as_ref()?;
        all.get(key).map(String::as_str)
    }

    /// Returns the file or directory that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the model's metadata, if it is a GGUF file.
    pub fn gguf(&self) -> Option<&moesaic_spec::gguf::Metadata> {
        self.gguf.as_ref().map(|gguf| &gguf.metadata)
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let gguf = self.gguf.iter().flat_map(Gguf::names);
        self.names.keys().chain(gguf).map(String::as_str)
    }

    /// Returns true if there is a tensor of that name. Opens no shard.
    pub fn has(&self, name: &str) -> bool {
        let gguf = self.gguf.as_ref();
        gguf.is_some_and(|gguf| gguf.tensor(name).is_some()) || self.names.contains_key(name)
    }

    /// Returns the tensor of that name without a copy, or `None` if there is none or its shard
    /// cannot be read. [`Checkpoint::find`] gives the reason.
    pub fn tensor(&self, name: &str) -> Option<TensorRef<'_>> {
        self.find(name).ok().flatten()
    }

    /// Returns the tensor of that name without a copy, or `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`WeightsError::MissingShard`] if the index names a missing file, [`WeightsError::Io`], or
    /// [`WeightsError::Corrupt`] for a shard that is truncated, invalid, or lacks the tensor.
    pub fn find(&self, name: &str) -> Result<Option<TensorRef<'_>>, WeightsError> {
        if let Some(gguf) = &self.gguf {
            return Ok(gguf.tensor(name).map(of_gguf));
        }
        let Some((name, shard)) = self.names.get_key_value(name) else {
            return Ok(None);
        };
        // Name the tensor too: the index is at hand, the shard may be one that was never
        // downloaded.
        let shard = self.shards[*shard].open().map_err(|error| match error {
            WeightsError::NotFound { path } => WeightsError::MissingShard {
                tensor: name.clone(),
                file: path,
            },
            other => other,
        })?;
        let Some(info) = shard.metadata.info(name) else {
            return Err(WeightsError::Corrupt {
                file: shard.file.clone(),
                reason: Damage::NotThere {
                    tensor: name.clone(),
                },
            });
        };
        let (start, end) = info.data_offsets;
        let (start, end) = (shard.data + start, shard.data + end);
        Ok(Some(TensorRef {
            name,
            file: &shard.file,
            dtype: ours(info),
            shape: &info.shape,
            bytes: &shard.map[start..end],
            map: &shard.map,
            start,
            ggml: None,
        }))
    }

    /// Returns all tensors by their names. Their bytes stay in the file.
    ///
    /// # Errors
    ///
    /// The same as [`Checkpoint::read`].
    pub fn tensors(&self) -> Result<Tensors<'static>, WeightsError> {
        let read = |name: &str| Ok((name.to_string(), self.read(name)?));
        self.names().map(read).collect()
    }

    /// Returns the tensor of that name, whose bytes stay in the file.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::find`], or [`WeightsError::MissingTensor`], or [`WeightsError::WrongDType`]
    /// for an unsupported element type.
    pub fn read(&self, name: &str) -> Result<Tensor<'static>, WeightsError> {
        let from = self
            .find(name)?
            .ok_or_else(|| WeightsError::MissingTensor {
                tensor: name.to_string(),
                path: self.path.clone(),
                tried: format!("`{name}`"),
                near: String::new(),
            })?;
        from.check_length()?;
        from.tensor().map_err(|found| WeightsError::WrongDType {
            tensor: name.to_string(),
            file: from.file.to_path_buf(),
            found: format!("{found:?}").to_lowercase(),
            expected: "f32, f16, bf16, i32 or i64".to_string(),
        })
    }

    fn add_whole(&mut self, file: PathBuf) -> Result<(), WeightsError> {
        let shard = Shard::open(file)?;
        let names = shard.metadata.offset_keys().into_iter();
        self.names
            .extend(names.map(|name| (name, self.shards.len())));
        self.shards.push(LazyShard::opened(shard));
        Ok(())
    }

    fn add_indexed(&mut self, dir: &Path) -> Result<(), WeightsError> {
        let index = dir.join(INDEX);
        let mut known: BTreeMap<String, usize> = BTreeMap::new();
        for (name, file) in read_index(&index)? {
            let at = match known.get(&file) {
                Some(at) => *at,
                None => {
                    self.shards
                        .push(LazyShard::closed(inside(dir, &index, &file)?));
                    known.insert(file, self.shards.len() - 1);
                    self.shards.len() - 1
                }
            };
            self.names.insert(name, at);
        }
        Ok(())
    }
}

impl LazyShard {
    fn closed(file: PathBuf) -> LazyShard {
        let opened = OnceLock::new();
        LazyShard { file, opened }
    }

    fn opened(shard: Shard) -> LazyShard {
        LazyShard {
            file: shard.file.clone(),
            opened: OnceLock::from(shard),
        }
    }

    fn open(&self) -> Result<&Shard, WeightsError> {
        if let Some(shard) = self.opened.get() {
            return Ok(shard);
        }
        // Two threads may both open it; the second's is dropped.
        let shard = Shard::open(self.file.clone())?;
        Ok(self.opened.get_or_init(|| shard))
    }
}

/// All tensors by their names in the files. Tensors with unsupported element types are left out.
impl WeightSource for Checkpoint {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let tensor = self.tensor(name)?;
        Some((tensor.dtype.ok()?, tensor.shape.to_vec()))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let from = self
            .find(name)?
            .ok_or_else(|| format!("there is no tensor `{name}`"))?;
        let dtype = from
            .dtype
            .map_err(|found| format!("has elements of type {found:?}"))?;
        let count = from.shape.first().copied().unwrap_or(1);
        if rows.start > rows.end || rows.end > count {
            return Err(format!("has {count} rows, not those of {rows:?}").into());
        }
        let row = from.bytes.len() / count.max(1);
        let mut shape = from.shape.to_vec();
        if let Some(first) = shape.first_mut() {
            *first = rows.len();
        }
        let data = from.data(rows.start * row..rows.end * row);
        Ok(Tensor { dtype, shape, data })
    }
}

impl Shard {
    fn open(file: PathBuf) -> Result<Shard, WeightsError> {
        let handle = regular::open(&file)?;
        let length = handle.metadata().map_err(WeightsError::io(&file))?.len();
        // An empty file cannot be mapped, and a shorter one has no header length.
        if length < 8 {
            let reason = format!("{length} bytes are too few for a safetensors file");
            let reason = Damage::CutShort(reason);
            return Err(WeightsError::Corrupt { file, reason });
        }
        let map = Map::new(&handle).map_err(WeightsError::io(&file))?;
        let read = SafeTensors::read_metadata(&map);
        let (header, metadata) = match read {
            Ok(read) => read,
            Err(error) => {
                let reason = explain(&error, length);
                return Err(WeightsError::Corrupt { file, reason });
            }
        };
        Ok(Shard {
            file,
            map: Arc::new(map),
            metadata,
            data: header + 8,
        })
    }
}

/// Explains the library's error in a user's words.
fn explain(error: &safetensors::SafeTensorError, length: u64) -> Damage {
    use safetensors::SafeTensorError as E;
    match error {
        E::MetadataIncompleteBuffer => Damage::CutShort(format!(
            "its {length} bytes are not those its header asks for"
        )),
        E::InvalidHeaderLength => {
            Damage::CutShort(format!("its header is longer than its {length} bytes"))
        }
        other => Damage::Header(format!("not a safetensors file ({other})")),
    }
}

/// Returns the GGUF file that a path leads to: the file itself, or that of a directory with a
/// single model and no safetensors.
fn gguf_of(path: &Path) -> Option<PathBuf> {
    if !path.is_dir() {
        return gguf::is_gguf(path).then(|| path.to_path_buf());
    }
    // A folder with both formats is read as safetensors, which holds the model's own precision.
    if path.join(SINGLE).exists() || path.join(INDEX).exists() {
        return None;
    }
    match gguf::models(path).as_slice() {
        [only] => gguf::is_gguf(only).then(|| only.clone()),
        _ => None,
    }
}

/// Returns a tensor of a GGUF file.
fn of_gguf(found: gguf::Found<'_>) -> TensorRef<'_> {
    let info = found.info;
    let (dtype, ggml) = match info.kind {
        Kind::Numbers(dtype) => (Ok(dtype), None),
        // safetensors has no type for ggml's blocks; `ggml` carries the real one.
        other => (Err(safetensors::Dtype::U8), Some(other)),
    };
    TensorRef {
        name: found.name,
        file: found.file,
        dtype,
        shape: &info.shape,
        bytes: &found.map[info.bytes.clone()],
        map: found.map,
        start: info.bytes.start,
        ggml,
    }
}

fn ours(info: &TensorInfo) -> Result<DType, safetensors::Dtype> {
    match info.dtype {
        safetensors::Dtype::F32 => Ok(DType::F32),
        safetensors::Dtype::F16 => Ok(DType::F16),
        safetensors::Dtype::BF16 => Ok(DType::Bf16),
        safetensors::Dtype::I32 => Ok(DType::I32),
        safetensors::Dtype::I64 => Ok(DType::I64),
        other => Err(other),
    }
}

/// Returns pairs of tensor and file name.
pub(crate) fn read_index(index: &Path) -> Result<Vec<(String, String)>, WeightsError> {
    let text = fs::read_to_string(index).map_err(WeightsError::io(index))?;
    let corrupt = |reason: String| WeightsError::Corrupt {
        file: index.to_path_buf(),
        reason: Damage::Index(reason),
    };
    let json = parse_json(&text).map_err(|e| corrupt(format!("not JSON ({e})")))?;
    let map = json
        .get("weight_map")
        .and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| corrupt("it has no object `weight_map`".to_string()))?;
    let pair = |(name, file): (&String, &serde_json::Value)| match file.as_str() {
        Some(file) => Ok((name.clone(), file.to_string())),
        None => Err(corrupt(format!("the file of `{name}` is not a string"))),
    };
    map.iter().map(pair).collect()
}

/// Returns the path of a shard, and refuses a name that leaves the directory.
pub(crate) fn inside(dir: &Path, index: &Path, file: &str) -> Result<PathBuf, WeightsError> {
    let path = Path::new(file);
    if path
        .components()
        .all(|part| matches!(part, Component::Normal(_)))
    {
        return Ok(dir.join(path));
    }
    Err(WeightsError::Corrupt {
        file: index.to_path_buf(),
        reason: Damage::Outside {
            file: file.to_string(),
        },
    })
}

/// Returns the error for a directory without weights, with the files that it does have.
fn no_weights(dir: &Path) -> WeightsError {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let weights = |name: &String| {
        [".safetensors", ".bin", ".pt", ".pth", ".gguf"]
            .iter()
            .any(|end| name.ends_with(end))
    };
    let mut names: Vec<String> = names.filter(weights).collect();
    names.sort();
    let found = match names.as_slice() {
        [] => String::new(),
        [first] => format!("; it has {first}: pass that file if it is a safetensors file"),
        [first, rest @ ..] => {
            let files = if rest.len() == 1 { "file" } else { "files" };
            let any = |end: &str| names.iter().any(|name| name.ends_with(end));
            let remedy = if any(".safetensors") {
                "put the model's index beside them, which says what each one holds"
            } else if any(".gguf") {
                "pass one of them"
            } else {
                "convert them to safetensors"
            };
            format!(
                "; it has {first} and {} more weight {files}: {remedy}",
                rest.len()
            )
        }
    };
    WeightsError::NoWeights {
        dir: dir.to_path_buf(),
        found,
    }
}
