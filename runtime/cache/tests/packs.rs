//! Packs: round trips, and refused packs.

use crate::common::{files, kernel_path, key, source, stored};
use flate2::Compression;
use flate2::write::GzEncoder;
use moesaic_cache::{Imported, Store, list_pack};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

fn filled(dir: &Path, names: &[&str]) -> Store {
    let store = Store::open(dir);
    for name in names {
        let source = source(name);
        store
            .put(&key(&source), &source, &stored(&source, 5000))
            .unwrap();
    }
    store
}

/// Returns a pack of three kernels.
fn packed(dir: &Path) -> PathBuf {
    let pack = dir.join("pack.tar.gz");
    let exported = filled(&dir.join("from"), &["a", "b", "c"])
        .export(&pack, |_| true)
        .unwrap();
    assert_eq!(
        (exported.kernels, exported.bytes),
        (3, pack.metadata().unwrap().len())
    );
    pack
}

/// Imports a pack that must be refused, and checks that the store stays empty. The pack is not
/// listed either.
fn refused(dir: &Path, pack: &Path) -> String {
    let to = dir.join("to");
    let error = Store::open(&to).import(pack).unwrap_err().to_string();
    assert_eq!(list_pack(pack).unwrap_err().to_string(), error);
    assert_eq!(files(&to), Vec::<String>::new(), "{error}");
    error
}

/// Writes a pack with these members.
fn forge(path: &Path, members: &[(&str, tar::EntryType, &[u8])]) {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (name, kind, bytes) in members {
        let mut header = tar::Header::new_gnu();
        // Written by hand, because the tar crate refuses names that lead upwards.
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_size(bytes.len() as u64);
        header.set_cksum();
        tar.append(&header, *bytes).unwrap();
    }
    fs::write(path, tar.into_inner().unwrap().finish().unwrap()).unwrap();
}

#[test]
fn a_pack_fills_another_store_with_the_same_files() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(dir.path());
    let to = Store::open(dir.path().join("to"));
    assert_eq!(
        to.import(&pack).unwrap(),
        Imported {
            added: 3,
            ..Imported::default()
        }
    );
    assert_eq!(
        to.import(&pack).unwrap(),
        Imported {
            present: 3,
            ..Imported::default()
        }
    );
    let from = dir.path().join("from");
    assert_eq!(files(to.dir()), files(&from));
    for file in files(&from) {
        assert_eq!(
            fs::read(from.join(&file)).unwrap(),
            fs::read(to.dir().join(&file)).unwrap()
        );
    }
}

#[test]
fn a_pack_is_listed_as_the_store_of_its_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(dir.path());
    let list = list_pack(&pack).unwrap();
    assert_eq!(list.tunings, []);
    let store = Store::open(dir.path().join("from")).list();
    assert_eq!(list.kernels.len(), store.len());
    for (packed, listed) in list.kernels.iter().zip(&store) {
        assert_eq!(
            (packed.key, &packed.info, packed.bytes),
            (listed.key, &listed.info, listed.bytes)
        );
        let name = format!("cpu-avx2/{}.{}.kernel", listed.info.name, listed.key);
        assert_eq!(packed.member, name);
    }
}

#[test]
fn the_same_kernels_give_the_same_pack() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(dir.path());
    let to = Store::open(dir.path().join("to"));
    to.import(&pack).unwrap();
    let again = dir.path().join("again.tar.gz");
    to.export(&again, |_| true).unwrap();
    assert!(fs::read(pack).unwrap() == fs::read(again).unwrap());
}

#[test]
fn a_filter_chooses_and_names_are_readable() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(&dir.path().join("from"), &["a", "b"]);
    let pack = dir.path().join("b.tar.gz");
    assert_eq!(
        store
            .export(&pack, |listed| listed.info.name == "b")
            .unwrap()
            .kernels,
        1
    );
    let listing = std::process::Command::new("tar")
        .arg("-tzf")
        .arg(&pack)
        .output()
        .unwrap();
    let hex = key(&source("b")).hex();
    let names = format!("moesaic-pack.json\ncpu-avx2/b.{hex}.kernel\ncpu-avx2/b.{hex}.c\n");
    assert_eq!(String::from_utf8(listing.stdout).unwrap(), names);
}

#[test]
fn an_empty_store_makes_an_empty_pack() {
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("pack.tar.gz");
    assert_eq!(
        filled(&dir.path().join("from"), &[])
            .export(&pack, |_| true)
            .unwrap()
            .kernels,
        0
    );
    assert_eq!(
        Store::open(dir.path().join("to")).import(&pack).unwrap(),
        Imported::default()
    );
}

#[test]
fn a_truncated_pack_is_refused_whole() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(dir.path());
    let bytes = fs::read(&pack).unwrap();
    let short = dir.path().join("short.tar.gz");
    for length in (0..bytes.len())
        .step_by(bytes.len() / 60)
        .chain([bytes.len() - 1])
    {
        fs::write(&short, &bytes[..length]).unwrap();
        let error = refused(dir.path(), &short);
        assert!(
            error.contains("is truncated or damaged"),
            "{length}: {error}"
        );
        assert!(
            error.contains("short.tar.gz") && error.contains("none of it is used"),
            "{error}"
        );
    }
}

#[test]
fn a_pack_with_a_flipped_bit_is_refused_whole() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(dir.path());
    let bytes = fs::read(&pack).unwrap();
    // The first 10 bytes are gzip's header, whose time and system fields do not matter.
    for at in (10..bytes.len()).step_by(bytes.len() / 60) {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&pack, &bad).unwrap();
        refused(dir.path(), &pack);
    }
}

#[test]
fn a_tar_that_ends_early_is_noticed_by_its_count() {
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("pack.tar.gz");
    let file = tar::EntryType::Regular;
    forge(
        &pack,
        &[("moesaic-pack.json", file, br#"{"format":1,"kernels":2}"#)],
    );
    assert!(refused(dir.path(), &pack).contains("it has 0 of its 2 kernels"));
    forge(
        &pack,
        &[("moesaic-pack.json", file, br#"{"format":9,"kernels":0}"#)],
    );
    assert!(refused(dir.path(), &pack).contains("its format version is 9; this moesaic reads 1"));
    forge(&pack, &[]);
    assert!(refused(dir.path(), &pack).contains("it is empty"));
}

#[test]
fn strange_members_are_refused_and_write_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let manifest: (_, _, &[u8]) = (
        "moesaic-pack.json",
        tar::EntryType::Regular,
        br#"{"format":1,"kernels":1}"#,
    );
    let pack = dir.path().join("pack.tar.gz");
    let hex = key(&source("a")).hex();
    let traversal = format!("../../../evil.{hex}.kernel");
    let link = format!("a.{hex}.kernel");
    for (name, kind) in [
        ("../../evil", tar::EntryType::Regular),
        ("/etc/evil.c", tar::EntryType::Regular),
        (traversal.as_str(), tar::EntryType::Regular),
        (link.as_str(), tar::EntryType::Symlink),
        (link.as_str(), tar::EntryType::Link),
    ] {
        forge(&pack, &[manifest, (name, kind, b"")]);
        let error = refused(dir.path(), &pack);
        assert!(error.contains(name), "{error}");
    }
    assert!(!files(dir.path()).iter().any(|file| file.contains("evil")));
}

#[test]
fn a_kernel_under_a_wrong_key_or_with_a_wrong_source_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), &["a"]);
    let bytes = fs::read(kernel_path(dir.path(), &key(&source("a")))).unwrap();
    let manifest: (_, _, &[u8]) = (
        "moesaic-pack.json",
        tar::EntryType::Regular,
        br#"{"format":1,"kernels":1}"#,
    );
    let pack = dir.path().join("pack.tar.gz");
    let file = tar::EntryType::Regular;
    let wrong = format!("x/b.{}.kernel", key(&source("b")));
    forge(&pack, &[manifest, (&wrong, file, &bytes)]);
    assert!(refused(dir.path(), &pack).contains("do not match its hash"));
    let right = format!("x/a.{}.kernel", key(&source("a")));
    let text = format!("x/a.{}.c", key(&source("a")));
    forge(
        &pack,
        &[
            manifest,
            (&right, file, &bytes),
            (&text, file, b"int evil;"),
        ],
    );
    assert!(refused(dir.path(), &pack).contains("is not the source of the kernel before it"));
    forge(&pack, &[manifest, (&right, file, &bytes)]);
    assert_eq!(
        Store::open(dir.path().join("to"))
            .import(&pack)
            .unwrap()
            .added,
        1
    );
}

#[test]
fn what_is_no_pack_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = refused(dir.path(), &dir.path().join("gone.tar.gz"));
    assert!(
        error.contains("cannot read") && error.contains("gone.tar.gz"),
        "{error}"
    );
    let text = dir.path().join("text");
    fs::write(&text, "not a pack at all").unwrap();
    assert!(refused(dir.path(), &text).contains("truncated or damaged"));
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(&[7; 4096]).unwrap();
    fs::write(&text, gz.finish().unwrap()).unwrap();
    assert!(refused(dir.path(), &text).contains("truncated or damaged"));
}

#[test]
fn a_store_that_cannot_write_imports_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pack = packed(dir.path());
    // The store's own directory works, but a directory blocks one kernel's file.
    let to = dir.path().join("to");
    let place = kernel_path(&to, &key(&source("c")));
    fs::create_dir_all(place.join("x")).unwrap();
    let error = Store::open(&to).import(&pack).unwrap_err().to_string();
    assert!(
        error.starts_with("nothing was imported: the kernel cache cannot"),
        "{error}"
    );
    assert_eq!(Store::open(&to).list(), []);
}

/// Member names are read before anything else is known about them, so their length must be bounded.
#[test]
fn a_name_without_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("pack.tar.gz");
    let name = vec![b'a'; 5000];
    let long = tar::EntryType::GNULongName;
    let manifest = &br#"{"format":1,"kernels":0}"#[..];
    let file = tar::EntryType::Regular;
    forge(
        &pack,
        &[
            ("././@LongLink", long, &name),
            ("moesaic-pack.json", file, manifest),
        ],
    );
    let error = refused(dir.path(), &pack);
    assert!(error.contains("a name of 5000 bytes"), "{error}");
    let pax = ("x", tar::EntryType::XHeader, &b"11 size=99\n"[..]);
    forge(&pack, &[("moesaic-pack.json", file, manifest), pax]);
    let error = refused(dir.path(), &pack);
    assert!(error.contains("`x` is not a file of a pack"), "{error}");
}

/// A tuning's file is named after its layer, which the author of a pack chooses.
#[test]
fn a_tuning_whose_layer_is_a_path_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("pack.tar.gz");
    let manifest = &br#"{"format":1,"kernels":0,"tunings":1}"#[..];
    let file = tar::EntryType::Regular;
    for layer in ["/../../../../x", "..", "", "AB", "a/b"] {
        let tuning = format!(
            "  \"target\": \"cpu:avx2\", \"layer\": \"{layer}\", \"name\": \"x\", \
             \"machine\": {{\"name\": \"A\", \"threads\": 1}}, \"buckets\": []}}"
        );
        let check = moesaic_cache::hash_source(&tuning);
        let tuning = format!("{{\n  \"check\": \"{check}\",\n{tuning}");
        let members = [
            ("moesaic-pack.json", file, manifest),
            ("tuned/x.json", file, tuning.as_bytes()),
        ];
        forge(&pack, &members);
        let error = refused(dir.path(), &pack);
        assert!(error.contains("its layer is not a hash"), "{error}");
    }
    let all = files(dir.path());
    assert_eq!(all, ["pack.tar.gz"], "something else was written");
}
