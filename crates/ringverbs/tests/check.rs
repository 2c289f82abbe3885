//! Errors of a program that its embedded device sees, reported by `RINGVERBS_CHECK`, and by
//! `Device::check`. Each has a program that does the same as it should be done.

use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, fs};

use ringverbs::check::CheckRule;
use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, ConnectOptions, Context, Device, ProtectionDomain,
    QueuePair, Transport,
};

const LENGTH: usize = 64;
/// After which time a send is tried again that has found no receive: longer than a test takes.
const RETRY: Duration = Duration::from_millis(491);

/// Runs the device until it has seen all that is posted.
fn settle(device: &Device) {
    while device.drive() {}
}

fn buffer(domain: &ProtectionDomain, byte: u8) -> Buffer {
    let mut buffer = domain.alloc(LENGTH).unwrap().into_buffer();
    buffer.set_len(LENGTH).unwrap();
    buffer.fill(byte);
    buffer
}

fn connected(
    context: &Context,
    domain: &ProtectionDomain,
    queues: [&CompletionQueue; 2],
) -> [QueuePair; 2] {
    let queue_pair = |queue| domain.queue_pair(Transport::Reliable, queue).build();
    let (mut a, mut b) = (
        queue_pair(queues[0]).unwrap(),
        queue_pair(queues[1]).unwrap(),
    );
    let local = context.local_address(1).unwrap();
    let (of_a, of_b) = (a.endpoint(&local), b.endpoint(&local));
    let options = ConnectOptions::new().rnr_timer(RETRY);
    a.connect_with(&local, &of_b, &options).unwrap();
    b.connect_with(&local, &of_a, &options).unwrap();
    [a, b]
}

/// Posts more receives than their completion queue has entries for.
fn overfill(device: &Device, is_right: bool) {
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let entries = if is_right { 7 } else { 3 };
    let cq = context.completion_queue().entries(entries).build().unwrap();
    let [mut a, _b] = connected(&context, &domain, [&cq, &cq]);
    for token in 0..5 {
        a.receive(buffer(&domain, 0), token).unwrap();
    }
    settle(device);
}

/// Two queue pairs write to the same bytes; the first one waits for a receive meanwhile.
fn overlap(device: &Device, is_right: bool) {
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = || context.completion_queue().entries(16).build().unwrap();
    let (mut cq, receives) = (queue(), queue());
    let [mut a, mut b] = connected(&context, &domain, [&cq, &receives]);
    let [mut c, _d] = connected(&context, &domain, [&cq, &receives]);
    let target = domain
        .alloc_remote(4096, AccessFlags::REMOTE_WRITE)
        .unwrap();
    a.send(buffer(&domain, 0), 0).unwrap();
    settle(device);
    a.write(buffer(&domain, 1), target.key(), 1).unwrap();
    settle(device);
    if is_right {
        b.receive(buffer(&domain, 0), 0).unwrap();
        for _ in 0..2 {
            cq.poll_until_one().unwrap().result.unwrap();
        }
    }
    c.write(buffer(&domain, 2), target.key().offset(32), 2)
        .unwrap();
    settle(device);
    if !is_right {
        b.receive(buffer(&domain, 0), 0).unwrap();
    }
    for _ in 0..if is_right { 1 } else { 3 } {
        cq.poll_until_one().unwrap().result.unwrap();
    }
}

fn run(device: &Device, error: &str, is_right: bool) {
    match error {
        "completion-queue-too-small" => overfill(device, is_right),
        _ => overlap(device, is_right),
    }
}

/// The program that the other tests run.
#[test]
#[ignore = "run by another test"]
fn subject() {
    let device = match Device::embedded() {
        Ok(device) => device,
        Err(error) => return println!("refused: {error}"),
    };
    let case = env::var("CASE").unwrap();
    let (error, kind) = case.split_once('/').unwrap();
    run(&device, error, kind == "right");
}

/// Runs that program.
fn checked(case: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "subject", "--ignored", "--nocapture"]);
    command.env("CASE", case).envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// Returns what it reports.
fn said(case: &str, variables: &[(&str, &str)]) -> String {
    String::from_utf8(checked(case, variables).stderr).unwrap()
}

const ERRORS: [&str; 2] = ["completion-queue-too-small", "overlapping-access"];

#[test]
fn errors_are_reported_if_the_environment_says_so() {
    let on = [("RINGVERBS_CHECK", "1")];
    for error in ERRORS {
        let text = said(&format!("{error}/wrong"), &on);
        let start = format!("ringverbs: embedded: error {error}: ");
        assert!(text.starts_with(&start), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.ends_with(": errors: 1\n"), "{text}");
        let text = said(&format!("{error}/right"), &on);
        assert!(text.starts_with("ringverbs: check of process "), "{text}");
        assert!(text.ends_with(": errors: 0\n"), "{text}");
        assert_eq!(said(&format!("{error}/wrong"), &[]), "");
    }
}

#[test]
fn reports_go_to_a_file_and_known_errors_to_none() {
    let folder = env::temp_dir().join(format!("ringverbs-check-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (reports, counted, known) = (path("reports"), path("counted"), path("known"));
    fs::write(&counted, "").unwrap();
    let case = format!("{}/wrong", ERRORS[0]);
    let on = [
        ("RINGVERBS_CHECK", &*reports),
        ("RINGVERBS_CHECK_ERRORS", &*counted),
        ("RINGVERBS_CHECK_SUPPRESSIONS", &*known),
    ];
    assert_eq!(said(&case, &on[..2]), "");
    let text = fs::read_to_string(&reports).unwrap();
    assert!(text.ends_with(": errors: 1\n"), "{text}");
    assert_eq!(fs::read_to_string(&counted).unwrap(), "E");
    // A rule that this checker does not have.
    fs::write(&known, "leak\ncompletion-queue-too-small has 4 entries\n").unwrap();
    assert_eq!(said(&case, &on), "");
    let text = fs::read_to_string(&reports).unwrap();
    assert!(text.ends_with(": errors: 0, suppressed: 1\n"), "{text}");
    assert_eq!(fs::read_to_string(&counted).unwrap(), "E");
    // A file that cannot be written.
    let nowhere = path("no/folder");
    let output = checked(&case, &[("RINGVERBS_CHECK", &nowhere)]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("refused: "), "{text}");
    assert!(text.contains("RINGVERBS_CHECK"), "{text}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_program_may_look_for_errors_itself() {
    let network = embedded::Network::new(embedded::Drive::Thread).unwrap();
    let device = Device::from(network.device("ib").unwrap());
    let rules = Arc::new(Mutex::new(Vec::new()));
    let found = Arc::clone(&rules);
    let report = move |error: &ringverbs::check::ProgramError| {
        found.lock().unwrap().push(error.rule);
    };
    device.check(report).unwrap();
    for error in ERRORS {
        run(&device, error, true);
        run(&device, error, false);
    }
    let expected = [
        CheckRule::CompletionQueueTooSmall,
        CheckRule::OverlappingAccess,
    ];
    assert_eq!(*rules.lock().unwrap(), expected);
}
