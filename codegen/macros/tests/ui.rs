//! What the compiler says about mistakes. `TRYBUILD=overwrite` rewrites the
//! texts after a wanted change.

#[test]
fn mistakes_are_named_where_they_are() {
    trybuild::TestCases::new().compile_fail("../../tests/ui/*.rs");
}
