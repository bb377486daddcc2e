//! Packs: a `tar.gz` of kernels, to carry from one store to another.
//!
//! ```text
//! moesaic-pack.json                                  {"format":1,"kernels":2}
//! cuda-sm_90a/grouped_gemm_up.3fa0….kernel           the store's file, byte for byte
//! cuda-sm_90a/grouped_gemm_up.3fa0….cu               its source
//! tuned/cpu-avx512.05c3….json                        sizes that were measured, if all kernels
//!                                                    that they lead to are in the pack
//! ```
//!
//! The same kernels give the same bytes. Member names are for people: an import takes only the key
//! from a name, never a path.

use crate::layout::is_language;
use crate::tuned::{self, Unread};
use crate::upkeep::Listed;
use crate::{
    FORMAT_VERSION, KernelInfo, KernelKey, PackError, Store, StoredKernel, Tuned, format, store,
};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use moesaic_kernel::Target;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

const MANIFEST: &str = "moesaic-pack.json";
const TUNED: &str = "tuned/";

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    kernels: usize,
    /// The number of tuning members, which follow the kernels.
    #[serde(default, skip_serializing_if = "none")]
    tunings: usize,
}

fn none(count: &usize) -> bool {
    *count == 0
}

/// The contents of an exported pack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// The number of kernels.
    pub kernels: usize,
    /// The number of tunings whose kernels are all among them.
    pub tunings: usize,
    /// The size of the pack in bytes.
    pub bytes: u64,
}

/// The effect of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// The number of kernels that are new to the store.
    pub added: usize,
    /// The number of kernels that the store already had.
    pub present: usize,
    /// The number of tunings that are new to the store, which keeps its own ones.
    pub tunings: usize,
}

/// The contents of a pack.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PackList {
    /// The kernels, sorted by target and name.
    pub kernels: Vec<PackKernel>,
    /// The tunings.
    pub tunings: Vec<Tuned>,
}

/// A kernel of a pack.
#[derive(Clone, Debug, PartialEq)]
pub struct PackKernel {
    /// Its key.
    pub key: KernelKey,
    /// Its description.
    pub info: KernelInfo,
    /// The name of its member, by which `tar` extracts it.
    pub member: String,
    /// Bytes of the member.
    pub bytes: u64,
}

/// Reads and checks the pack `path`, and returns its contents.
///
/// # Errors
/// [`PackError::Io`], or [`PackError::Damaged`] if the pack is truncated or damaged anywhere.
pub fn list_pack(path: &Path) -> Result<PackList, PackError> {
    let mut list = PackList::default();
    read_pack(path, |item| {
        match item {
            Item::Kernel(packed, _) => list.kernels.push(PackKernel {
                key: packed.key,
                info: packed.stored.info,
                member: packed.member,
                bytes: packed.bytes,
            }),
            Item::Tuned(tuned) => list.tunings.push(tuned),
        }
        Ok(())
    })?;
    let order = |kernel: &PackKernel| {
        let (target, name) = (kernel.info.target.to_string(), kernel.info.name.clone());
        (target, name, kernel.key)
    };
    list.kernels.sort_by_cached_key(order);
    Ok(list)
}

impl Store {
    /// Writes the kernels that `filter` accepts to the pack `path`, which appears only when it is
    /// whole. A tuning goes along if all its kernels do.
    ///
    /// # Errors
    /// [`PackError::Io`].
    pub fn export(
        &self,
        path: &Path,
        filter: impl Fn(&Listed) -> bool,
    ) -> Result<Exported, PackError> {
        let chosen: Vec<Listed> = self
            .list()
            .into_iter()
            .filter(|item| filter(item))
            .collect();
        let io = |source| PackError::Io {
            action: "write",
            path: path.to_path_buf(),
            source,
        };
        // Renaming over a device such as /dev/stdout would replace the device.
        if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(io(io::Error::other("it is not an ordinary file")));
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let file = tempfile::NamedTempFile::new_in(dir.unwrap_or(Path::new("."))).map_err(io)?;
        let mut tar = tar::Builder::new(GzEncoder::new(&file, Compression::default()));
        let tunings = self.tunings_among(&chosen);
        self.fill(&mut tar, &chosen, &tunings).map_err(io)?;
        tar.into_inner().and_then(GzEncoder::finish).map_err(io)?;
        let bytes = file.as_file().metadata().map_err(io)?.len();
        share(file.as_file()).map_err(io)?;
        file.persist(path).map_err(|error| io(error.error))?;
        Ok(Exported {
            kernels: chosen.len(),
            tunings: tunings.len(),
            bytes,
        })
    }

    fn tunings_among(&self, chosen: &[Listed]) -> Vec<Tuned> {
        let known: HashSet<(Target, &str)> = chosen
            .iter()
            .map(|item| (item.info.target, &*item.info.source_hash))
            .collect();
        let whole = |tuned: &Tuned| {
            let here = |kernel| known.contains(&(tuned.target, kernel));
            // A tuning that found nothing better names no kernels and is of no use elsewhere.
            tuned.kernels().next().is_some() && tuned.kernels().all(here)
        };
        self.tunings().into_iter().filter(whole).collect()
    }

    fn fill<W: Write>(
        &self,
        tar: &mut tar::Builder<W>,
        chosen: &[Listed],
        tunings: &[Tuned],
    ) -> io::Result<()> {
        let manifest = Manifest {
            format: FORMAT_VERSION,
            kernels: chosen.len(),
            tunings: tunings.len(),
        };
        append(tar, MANIFEST, &serde_json::to_vec(&manifest)?)?;
        for item in chosen {
            let bytes = store::peek(&item.path)?;
            // The entry may have been pruned or damaged since it was listed.
            format::decode(&item.key, bytes.clone()).map_err(io::Error::other)?;
            append(tar, &member(item, "kernel"), &bytes)?;
            if let Some(text) = self.source(&item.key) {
                append(
                    tar,
                    &member(item, item.info.language.extension()),
                    text.as_bytes(),
                )?;
            }
        }
        for tuned in tunings {
            let bytes = tuned::encode(tuned)?;
            append(tar, &format!("{TUNED}{}", tuned.file_name()), &bytes)?;
        }
        Ok(())
    }

    /// Imports the kernels of the pack `path`: all of them, or none if the pack is truncated or
    /// damaged anywhere, or if the store cannot take one.
    ///
    /// # Errors
    /// [`PackError`].
    pub fn import(&self, path: &Path) -> Result<Imported, PackError> {
        // The first pass only checks, so damage at the end shows before anything is stored, and a
        // pack of any size needs little memory.
        read_pack(path, |_| Ok(()))?;
        let mut added = Vec::new();
        let mut imported = Imported::default();
        let result = read_pack(path, |item| self.take(item, &mut imported, &mut added));
        if result.is_err() {
            // The second pass can still fail, for example on a full disk. Then the store must look
            // as before.
            added.iter().for_each(|item| match item {
                Added::Kernel(key) => drop(self.remove(key)),
                Added::Tuned(tuned) => self.remove_tuned(tuned),
            });
        }
        result.map(|()| imported)
    }

    fn take(
        &self,
        item: Item<'_>,
        imported: &mut Imported,
        added: &mut Vec<Added>,
    ) -> Result<(), PackError> {
        match item {
            Item::Kernel(packed, _) if self.look(&packed.key).is_some() => imported.present += 1,
            Item::Kernel(packed, source) => {
                self.put_parts(&packed.key, source, &packed.stored)?;
                imported.added += 1;
                added.push(Added::Kernel(packed.key));
            }
            Item::Tuned(tuned) if self.has_tuned(&tuned) => {}
            Item::Tuned(tuned) => {
                self.keep_tuned(&tuned)?;
                imported.tunings += 1;
                added.push(Added::Tuned(tuned));
            }
        }
        Ok(())
    }
}

/// An item that an import put into the store.
enum Added {
    Kernel(KernelKey),
    Tuned(Tuned),
}

/// Makes a pack readable for others, since temporary files are private.
#[cfg(unix)]
fn share(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn share(_: &File) -> io::Result<()> {
    Ok(())
}

fn member(item: &Listed, extension: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "_-".contains(c) {
            c
        } else {
            '_'
        }
    };
    let name: String = item.info.name.chars().map(plain).collect();
    format!(
        "{}/{name}.{}.{extension}",
        item.info.target.file_name(),
        item.key
    )
}

/// Appends a member whose header is constant: without time and owner, so that equal kernels give
/// equal packs.
fn append<W: Write>(tar: &mut tar::Builder<W>, name: &str, bytes: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    header.set_mtime(0);
    tar.append_data(&mut header, name, bytes)
}

/// The items of a pack.
enum Item<'a> {
    /// A kernel and, if the pack has it, its source.
    Kernel(Box<Packed>, Option<&'a str>),
    Tuned(Tuned),
}

/// A kernel as a pack holds it.
struct Packed {
    key: KernelKey,
    stored: StoredKernel,
    /// The name of the member.
    member: String,
    /// Bytes of the member.
    bytes: u64,
}

type Sink<'a> = dyn FnMut(Item<'_>) -> Result<(), PackError> + 'a;

/// Reads and checks a whole pack, kernel by kernel.
fn read_pack(
    path: &Path,
    mut sink: impl FnMut(Item<'_>) -> Result<(), PackError>,
) -> Result<(), PackError> {
    let io = |source| PackError::Io {
        action: "read",
        path: path.to_path_buf(),
        source,
    };
    let file = BufReader::new(File::open(path).map_err(io)?);
    let mut tar = tar::Archive::new(GzDecoder::new(file));
    let mut reader = Reader {
        path,
        kernels: 0,
        tunings: 0,
        manifest: None,
        pending: None,
        long_name: None,
    };
    // Raw entries, because the library otherwise reads a name of any length into memory.
    let entries = tar.entries().map_err(|error| reader.damaged(error))?;
    for entry in entries.raw(true) {
        let entry = entry.map_err(|error| reader.damaged(error))?;
        reader.take(entry, &mut sink)?;
    }
    reader.flush(None, &mut sink)?;
    // The checksum comes after the last member, so read to the end.
    let drained = io::copy(&mut tar.into_inner(), &mut io::sink());
    drained.map_err(|error| reader.damaged(error))?;
    reader.finish()
}

struct Reader<'a> {
    path: &'a Path,
    kernels: usize,
    tunings: usize,
    /// The manifest, once it was read.
    manifest: Option<Manifest>,
    pending: Option<Box<Packed>>,
    /// The name of the next member, if it is too long for a header.
    long_name: Option<Vec<u8>>,
}

/// The longest accepted member name, in bytes.
const LONGEST_NAME: u64 = 1 << 12;

impl Reader<'_> {
    fn damaged(&self, reason: impl ToString) -> PackError {
        PackError::Damaged {
            path: self.path.to_path_buf(),
            reason: reason.to_string(),
        }
    }

    fn take<R: Read>(
        &mut self,
        mut entry: tar::Entry<'_, R>,
        sink: &mut Sink<'_>,
    ) -> Result<(), PackError> {
        let kind = entry.header().entry_type();
        if kind.is_gnu_longname() {
            return self.name(entry);
        }
        let name = self.long_name.take();
        let name = name.unwrap_or_else(|| entry.path_bytes().into_owned());
        let name = String::from_utf8_lossy(&name).into_owned();
        if kind.is_dir() {
            return Ok(());
        }
        // Links could point anywhere, and a large member could fill the memory.
        if !kind.is_file() || entry.size() > format::LARGEST {
            return Err(self.damaged(format!("`{name}` is not a file of a pack")));
        }
        let mut bytes = Vec::new();
        entry
            .read_to_end(&mut bytes)
            .map_err(|error| self.damaged(format!("`{name}`: {error}")))?;
        match Member::of(&name) {
            Some(Member::Manifest) => self.manifest(&bytes),
            // The manifest comes first, so that the format version is known before anything is
            // decoded.
            _ if self.manifest.is_none() => Err(self.damaged("it does not begin as a pack")),
            Some(Member::Kernel(key)) => self.kernel(key, &name, bytes, sink),
            Some(Member::Source(key)) => self.source(key, &name, &bytes, sink),
            Some(Member::Tuned) => self.tuned(&name, &bytes, sink),
            None => Err(self.damaged(format!("`{name}` is not a file of a pack"))),
        }
    }

    /// Reads a member that holds the name of the next one.
    fn name<R: Read>(&mut self, mut entry: tar::Entry<'_, R>) -> Result<(), PackError> {
        if entry.size() > LONGEST_NAME {
            let size = entry.size();
            return Err(self.damaged(format!("a name of {size} bytes")));
        }
        let mut bytes = Vec::new();
        let read = entry.read_to_end(&mut bytes);
        read.map_err(|error| self.damaged(error))?;
        bytes.truncate(bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len()));
        self.long_name = Some(bytes);
        Ok(())
    }

    fn manifest(&mut self, bytes: &[u8]) -> Result<(), PackError> {
        let manifest: Manifest =
            serde_json::from_slice(bytes).map_err(|error| self.damaged(error))?;
        if manifest.format != FORMAT_VERSION {
            return Err(self.damaged(format!(
                "its format version is {}; this moesaic reads {FORMAT_VERSION}",
                manifest.format
            )));
        }
        self.manifest = Some(manifest);
        Ok(())
    }

    fn kernel(
        &mut self,
        key: KernelKey,
        name: &str,
        bytes: Vec<u8>,
        sink: &mut Sink<'_>,
    ) -> Result<(), PackError> {
        self.flush(None, sink)?;
        let size = bytes.len() as u64;
        let stored = format::decode(&key, bytes)
            .map_err(|reason| self.damaged(format!("`{name}`: {reason}")))?;
        self.pending = Some(Box::new(Packed {
            key,
            stored,
            member: name.to_string(),
            bytes: size,
        }));
        Ok(())
    }

    fn source(
        &mut self,
        key: KernelKey,
        name: &str,
        bytes: &[u8],
        sink: &mut Sink<'_>,
    ) -> Result<(), PackError> {
        let text = std::str::from_utf8(bytes).ok();
        let fits = |text: &&str| {
            let pending = self.pending.as_ref().filter(|pending| pending.key == key);
            // A source counts only if the kernel before it was made from exactly this text.
            pending
                .is_some_and(|pending| pending.stored.info.source_hash == format::hash_source(text))
        };
        match text.filter(fits) {
            Some(text) => self.flush(Some(text), sink),
            None => Err(self.damaged(format!(
                "`{name}` is not the source of the kernel before it"
            ))),
        }
    }

    fn tuned(&mut self, name: &str, bytes: &[u8], sink: &mut Sink<'_>) -> Result<(), PackError> {
        self.flush(None, sink)?;
        self.tunings += 1;
        match tuned::decode(bytes) {
            Ok(tuned) => sink(Item::Tuned(tuned)),
            // Old packs remain useful for their kernels.
            Err(reason @ Unread::Former) => {
                tuned::pass_over(&self.path.join(name), &reason);
                Ok(())
            }
            Err(reason) => Err(self.damaged(format!("`{name}`: {reason}"))),
        }
    }

    /// Passes on the kernel that was waiting for its source.
    fn flush(&mut self, source: Option<&str>, sink: &mut Sink<'_>) -> Result<(), PackError> {
        let Some(packed) = self.pending.take() else {
            return Ok(());
        };
        self.kernels += 1;
        sink(Item::Kernel(packed, source))
    }

    fn finish(&self) -> Result<(), PackError> {
        let Some(Manifest {
            kernels, tunings, ..
        }) = self.manifest
        else {
            return Err(self.damaged("it is empty"));
        };
        // A tar cut off between members reads without an error, so compare the counts.
        if kernels != self.kernels {
            let found = self.kernels;
            return Err(self.damaged(format!("it has {found} of its {kernels} kernels")));
        }
        if tunings != self.tunings {
            let found = self.tunings;
            return Err(self.damaged(format!("it has {found} of its {tunings} tunings")));
        }
        Ok(())
    }
}

/// The kind of a member, by its name. Folders are ignored, so no name can lead out of the store.
enum Member {
    Manifest,
    Kernel(KernelKey),
    Source(KernelKey),
    Tuned,
}

impl Member {
    fn of(name: &str) -> Option<Member> {
        // Only the last part of a name counts, and of that only the key.
        let file = name.rsplit('/').next()?;
        if file == MANIFEST {
            return Some(Member::Manifest);
        }
        if name.starts_with(TUNED) && file.ends_with(".json") {
            return Some(Member::Tuned);
        }
        let mut parts = file.rsplit('.');
        let (extension, hex) = (parts.next()?, parts.next()?);
        let key: KernelKey = hex.parse().ok()?;
        match extension {
            "kernel" => Some(Member::Kernel(key)),
            _ => is_language(extension).then_some(Member::Source(key)),
        }
    }
}
