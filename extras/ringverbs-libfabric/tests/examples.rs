//! The examples, on the ConnectX in the process: what they print is what they are to do.
#![allow(missing_docs, reason = "a test")]

use std::process::Command;

use testing::program::example_path;

#[test]
fn tagged() {
    let mut command = Command::new(example_path("tagged"));
    let output = command.arg("embedded").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let expected = "sum of the results: 14\n\
                    log, line 2: step 2\n\
                    report of 600 bytes: all went well....\n";
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}
