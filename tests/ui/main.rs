//! The compiler's messages about mistakes. `TRYBUILD=overwrite` rewrites the expected texts.

#[test]
fn mistakes_are_named_where_they_are() {
    trybuild::TestCases::new().compile_fail("mistakes/*.rs");
}
