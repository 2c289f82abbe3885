//! Texts that are accepted, and where and why others are refused.

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;

fn one(text: &str) -> Fault {
    let faults = Faults::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(faults.list().len(), 1, "{text}");
    faults.list()[0].clone()
}

/// Every action and every matcher, as they are written.
const LINES: [&str; 47] = [
    "lose",
    "delay 2ms",
    "delay 1us..2500ns",
    "duplicate",
    "corrupt",
    "reorder 20us",
    "nak sequence",
    "nak invalid-request",
    "nak remote-access",
    "nak remote-operational",
    "rnr",
    "slow-receiver 5ms",
    "link-down",
    "link-down 1s",
    "link-up",
    "qp-error qp=0x41",
    "cq-error qp=#2",
    "qp-error opcode=send nth=3",
    "device-fatal",
    "die",
    "health 0x10",
    "health 0x1 fatal",
    "fail ibv_create_qp ENOMEM",
    "fail CREATE_MKEY",
    "memlock 64KiB",
    "memlock 0",
    "lose-event 0xa",
    "lose-completion",
    "return-receive",
    "lose device=3",
    "lose program=ib_write_bw",
    "lose qp=0xffffff",
    "lose qp=#1",
    "lose peer=0x52",
    "lose peer=192.0.2.1",
    "lose peer=fe80::1",
    "lose opcode=read-response",
    "lose opcode=other",
    "lose way=in",
    "lose nth=3",
    "lose nth=3..",
    "lose nth=1..4",
    "lose nth=1,3..4,9..",
    "lose chance=0.25 seed=7",
    "die after=1s",
    "lose after=1ms until=2s",
    "link-down 500ms device=0 qp=#1 opcode=ack way=out nth=10 chance=0.5 after=1s",
];

#[test]
fn faults_are_written_as_they_are_read() {
    for line in LINES {
        assert_eq!(one(line).to_string(), line);
    }
    assert_eq!(one("reorder").to_string(), "reorder 20us");
    assert_eq!(one("lose nth=..4").to_string(), "lose nth=1..4");
    assert_eq!(one("lose nth=1..").to_string(), "lose");
    assert_eq!(one("lose qp=65").matcher.qp, Some(QpName::Number(65)));
    let peer = IpAddr::from([192, 0, 2, 1]);
    assert_eq!(
        one("lose peer=192.0.2.1").matcher.peer,
        Some(Peer::Address(peer))
    );
}

#[test]
fn lines_are_counted_and_comments_ignored() {
    let text = "# first\n\n  lose nth=1 # as asked\r\n\tdelay 1ms qp=#2#\n";
    let error = Faults::parse(text).unwrap_err();
    assert_eq!((error.line, error.column), (4, 15));
    let faults = Faults::parse("#\nlose #x\n\ndelay 1ms").unwrap();
    let lines: Vec<usize> = faults.list().iter().map(|it| it.line).collect();
    assert_eq!(lines, [2, 4]);
    assert!(Faults::parse("").unwrap().list().is_empty());
}

/// Texts with the line and column of what is refused, and a part of the reason.
const BAD: [(&str, usize, usize, &str); 48] = [
    ("loose", 1, 1, "there is no action \"loose\""),
    ("lose\n\n  bogus", 3, 3, "there is no action \"bogus\""),
    ("qp=3 lose", 1, 1, "there is no action"),
    ("lose 3", 1, 6, "takes no \"3\""),
    ("lose nth=2 3", 1, 12, "takes no \"3\""),
    ("delay", 1, 6, "takes a time"),
    ("delay nth=3", 1, 6, "takes a time"),
    ("delay 5", 1, 7, "\"5\" is not a time"),
    ("delay 2ms..1ms", 1, 7, "the lesser first"),
    ("delay 2000s", 1, 7, "up to 1000s"),
    ("delay 99999999999999999999s", 1, 7, "is not a time"),
    ("delay -1ms", 1, 7, "is not a time"),
    ("nak", 1, 4, "takes a code"),
    ("nak busy", 1, 5, "sequence, invalid-request"),
    ("slow-receiver", 1, 14, "takes a time"),
    ("link-down soon", 1, 11, "is not a time"),
    ("qp-error", 1, 1, "it takes qp="),
    ("health 256", 1, 8, "from 0 to 255"),
    ("health 1 deadly", 1, 10, "is not fatal"),
    ("fail", 1, 5, "takes a verb"),
    ("fail create_qp", 1, 6, "is not a verb"),
    ("fail ibv_create_qp", 1, 19, "takes an error number"),
    (
        "fail ibv_create_qp EWRONG",
        1,
        20,
        "name of an error number",
    ),
    ("fail CREATE_QP ENOMEM", 1, 16, "takes no \"ENOMEM\""),
    ("memlock 5TiB", 1, 9, "is not a size"),
    ("memlock 99999999999GiB", 1, 9, "is not a size"),
    ("lose color=red", 1, 6, "there is no matcher \"color\""),
    ("lose =3", 1, 6, "there is no matcher \"\""),
    ("lose nth=2 nth=3", 1, 12, "\"nth\" is given twice"),
    ("lose nth=0", 1, 10, "a position from 1"),
    ("lose nth=5..2", 1, 10, "a position from 1"),
    ("lose nth=..", 1, 10, "a position from 1"),
    ("lose nth=+3", 1, 10, "a position from 1"),
    ("lose nth=3,2", 1, 10, "several in order"),
    ("lose nth=3..5,5", 1, 10, "several in order"),
    ("lose nth=3,", 1, 10, "a position from 1"),
    ("lose qp=0x1000000", 1, 9, "24 bits"),
    ("lose qp=#0", 1, 9, "24 bits"),
    ("lose peer=nobody", 1, 11, "an IP address"),
    ("lose opcode=SEND", 1, 13, "send, write"),
    ("lose chance=1.5", 1, 13, "probability"),
    ("lose chance=NaN", 1, 13, "probability"),
    ("lose seed=3", 1, 1, "without a chance"),
    ("lose after=2s until=1s", 1, 1, "ends before it begins"),
    ("fail ibv_reg_mr EIO qp=3", 1, 21, "does not take \"qp\""),
    ("rnr way=out", 1, 5, "does not take \"way\""),
    ("lose device=64", 1, 13, "from 0 to 63"),
    ("é lose\n", 1, 1, "there is no action \"é\""),
];

#[test]
fn bad_texts_are_refused_with_line_and_column() {
    for (text, line, column, reason) in BAD {
        let error = Faults::parse(text).expect_err(text);
        assert_eq!(
            (error.line, error.column),
            (line, column),
            "{text}: {error}"
        );
        assert!(error.to_string().contains(reason), "{text}: {error}");
    }
}

#[test]
fn texts_have_limits() {
    let many = "lose\n".repeat(MAX_FAULTS);
    assert_eq!(Faults::parse(&many).unwrap().list().len(), MAX_FAULTS);
    let error = Faults::parse(&format!("{many}lose")).unwrap_err();
    assert_eq!(
        (error.line, error.reason),
        (MAX_FAULTS + 1, Reason::TooMany)
    );
    let long = "#".repeat(MAX_TEXT + 1);
    assert_eq!(Faults::parse(&long).unwrap_err().reason, Reason::TooLong);
}

#[test]
fn positions_are_found_in_their_ranges() {
    let positions = one("lose nth=2,4..6,9..").matcher.nth;
    let found: Vec<u64> = (0..12).filter(|it| positions.contains(*it)).collect();
    assert_eq!(found, [2, 4, 5, 6, 9, 10, 11]);
    assert_eq!(positions.last(), u64::MAX);
    assert!(!positions.is_all() && Positions::default().is_all());
}

/// Returns a decision about a packet that is sent.
fn sent(action: Action, order: u32, nth: u64) -> Decision {
    Decision {
        action,
        qp: Some(QpName::Order(order)),
        opcode: Some(PacketKind::Send),
        way: Some(Way::Out),
        when: When::Nth(nth),
    }
}

#[test]
fn a_log_has_a_fault_for_each_action_and_queue_pair() {
    let mut log = FaultLog::default();
    let delay = Action::Delay { least: 1, most: 2 };
    for (action, order, nth) in [
        (Action::Lose, 1, 3),
        (Action::Lose, 1, 4),
        (Action::Lose, 2, 1),
        (Action::Lose, 1, 9),
        // By two faults.
        (Action::Lose, 1, 9),
        (delay, 1, 9),
        (Action::Die, 1, 9),
        (Action::Die, 1, 12),
    ] {
        log.add(0, Some("a"), &sent(action, order, nth)).unwrap();
    }
    let late = Decision {
        when: When::After(2_000_000),
        opcode: None,
        way: None,
        ..sent(Action::QpError, 1, 0)
    };
    log.add(1, None, &late).unwrap();
    let text = log.to_string();
    let packets = "program=a qp=#1 opcode=send way=out";
    let lines = [
        format!("lose device=0 {packets} nth=3..4,9"),
        "lose device=0 program=a qp=#2 opcode=send way=out nth=1".to_owned(),
        format!("delay 1ns..2ns device=0 {packets} nth=9"),
        format!("die device=0 {packets} nth=9"),
        format!("die device=0 {packets} nth=12"),
        "qp-error device=1 qp=#1 after=2ms".to_owned(),
    ];
    assert_eq!(text, lines.map(|line| line + "\n").concat());
    check_text(&text);
}

#[test]
fn a_log_ends_where_its_text_would_be_refused() {
    let mut log = FaultLog::default();
    let mut add = |order, nth| log.add(0, None, &sent(Action::Lose, order, nth));
    let full = (1..).find_map(|order| Some((order, add(order, 1).err()?)));
    assert_eq!(full, Some((MAX_FAULTS as u32 + 1, LogFull::Faults)));
    assert_eq!(add(1, 3), Ok(()));
    let full = (2..).find_map(|it| add(1, 2 * it).err());
    assert_eq!(full, Some(LogFull::Length));
    let text = log.to_string();
    assert!(text.len() <= MAX_TEXT - FaultLog::RESERVED);
    assert_eq!(Faults::parse(&text).unwrap().list().len(), MAX_FAULTS);
    let late = When::After(u64::MAX);
    let late = Decision {
        when: late,
        ..sent(Action::LinkUp, 1, 0)
    };
    assert_eq!(FaultLog::default().add(0, None, &late), Err(LogFull::Time));
}

/// A line of words of the language, in any order.
fn words() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        prop::sample::select(LINES.to_vec()).prop_map(str::to_owned),
        "[a-z=#.0-9é\\- ]{0,12}",
    ];
    prop::collection::vec(word, 0..4).prop_map(|words| words.join(" "))
}

proptest! {
    #[test]
    fn what_is_accepted_can_be_written(lines in prop::collection::vec(words(), 0..6)) {
        check_text(&lines.join("\n"));
    }
}
