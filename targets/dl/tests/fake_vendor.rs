//! Opens a vendor library that the test builds with the system C compiler.

use moesaic_dl::{DlError, Library, dl_table};
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "
int vendor_version(int *major, int *minor) { *major = 7; *minor = 3; return 0; }
long vendor_add(long a, long b) { return a + b; }
float vendor_extra(float x) { return x * 2; }
";

dl_table! {
    /// The fake vendor's functions.
    struct Vendor {
        version: fn(major: *mut c_int, minor: *mut c_int) -> c_int = "vendor_version";
        add: fn(a: i64, b: i64) -> i64 = "vendor_add";
    }
    optional {
        extra: fn(x: f32) -> f32 = "vendor_extra";
        newer: fn(x: f32) -> f32 = "vendor_newer";
    }
}

dl_table! {
    /// A table with a function that the library lacks.
    #[derive(Debug)]
    struct Greedy {
        version: fn(major: *mut c_int, minor: *mut c_int) -> c_int = "vendor_version";
        launch: fn(n: c_int) = "vendor_launch";
    }
}

fn build(folder: &Path) -> PathBuf {
    let source = folder.join("vendor.c");
    let library = folder.join("libvendor.so");
    std::fs::write(&source, SOURCE).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
        .expect("the test needs a C compiler named `cc`");
    assert!(status.success(), "cc: {status}");
    library
}

#[test]
fn a_table_calls_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(folder.path());
    let missing = folder.path().join("libvendor.so.9");
    let library = Library::open("the vendor library", &[&missing, &path]).unwrap();
    assert_eq!(library.name(), path.to_str().unwrap());
    // SAFETY: the signatures are those of SOURCE.
    let table = unsafe { Vendor::load(library) }.unwrap();
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for a write.
    assert_eq!(unsafe { table.version(&mut major, &mut minor) }, 0);
    assert_eq!((major, minor), (7, 3));
    // SAFETY: no overflow.
    assert_eq!(unsafe { table.add(i64::MAX - 5, 3) }, i64::MAX - 2);
    // SAFETY: takes any float.
    assert_eq!(unsafe { table.extra.unwrap()(1.25) }, 2.5);
    assert!(table.newer.is_none());
    assert_eq!(table.library(), path.to_str().unwrap());
}

#[test]
fn a_missing_symbol_names_library_and_symbol() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(folder.path());
    let library = Library::open_path("the vendor library", &path).unwrap();
    // SAFETY: loading fails before anything is called.
    let error = unsafe { Greedy::load(library) }.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()), "{text}");
    assert!(text.contains("has no symbol `vendor_launch`: "), "{text}");
    assert!(
        text.contains("undefined symbol"),
        "the loader's own words: {text}"
    );
}

#[test]
fn every_name_tried_is_listed_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("libtext.so");
    std::fs::write(
        &bad,
        "this is no shared object, just text that is long enough to hold a header",
    )
    .unwrap();
    let candidates = [
        "libmoesaic_no_such.so.2".to_string(),
        bad.display().to_string(),
    ];
    let error = Library::open("the vendor library", &candidates).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("cannot load the vendor library; tried `libmoesaic_no_such.so.2` ("),
        "{text}"
    );
    assert!(text.contains("libtext.so` ("), "{text}");
    let DlError::NotFound { attempts, .. } = error else {
        panic!("{text}")
    };
    assert_eq!(attempts.len(), 2);
    assert!(attempts.iter().all(|attempt| !attempt.reason.is_empty()));
}

#[test]
fn a_bare_file_name_is_a_path_and_never_searched() {
    let error = Library::open_path("a kernel", Path::new("libc.so.6")).unwrap_err();
    assert!(error.to_string().contains("/libc.so.6` ("), "{error}");
}

#[test]
fn no_candidates_is_an_error_too() {
    let error = Library::open::<&str>("nothing", &[]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot load nothing; tried nothing: no candidate was named"
    );
}

#[test]
fn a_kernel_library_is_unloaded_on_drop() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(folder.path());
    let mapped = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .contains(path.to_str().unwrap())
    };
    let library = Library::open_path("a kernel", &path).unwrap();
    assert!(mapped());
    drop(library);
    assert!(!mapped());
}
