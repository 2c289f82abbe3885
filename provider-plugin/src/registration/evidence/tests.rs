use super::*;

/// What a genuine library of a release shows.
fn genuine(release: u32, named: bool) -> Evidence {
    let layout = Layout::of_release(release).unwrap();
    let minor = MINORS.iter().rev().find(|m| m.1 <= release).unwrap().0;
    Evidence {
        pabis: vec![layout.pabi],
        markers: MARKERS.iter().map(|m| m.since <= release).collect(),
        file: if named {
            FileVersion::Known(minor, release)
        } else {
            FileVersion::Absent
        },
        name_suffix: Some(layout.pabi),
        fallback: FallbackEvidence::default(),
    }
}

/// The same of a library whose file name does not tell, as it is probed.
fn probed(release: u32) -> Evidence {
    let mut evidence = genuine(release, false);
    evidence.fallback.extra_qp_words = Some(Layout::of_release(release).unwrap().extra_qp_words());
    evidence
}

#[test]
fn every_release_is_recognised_by_its_file_name() {
    for release in 34..=65 {
        assert_eq!(
            decide(&genuine(release, true)),
            Ok(Layout::of_release(release).unwrap())
        );
    }
}

#[test]
fn without_a_file_name_ambiguous_releases_are_refused() {
    for release in 34..=65 {
        let decided = decide(&genuine(release, false));
        match release {
            // 36 can only be 36; 37 to 48 look alike but have three layouts;
            // 65 may be a later release with the same private ABI.
            37..=48 | 65 => assert!(decided.is_err(), "{release}: {decided:?}"),
            _ => assert_eq!(
                decided,
                Ok(Layout::of_release(release).unwrap()),
                "{release}"
            ),
        }
    }
}

#[test]
fn ibv_qp_ex_identifies_all_but_the_newest_without_a_file_name() {
    for release in 34..=65 {
        let decided = decide(&probed(release));
        match release {
            65 => assert!(decided.unwrap_err().contains("RINGVERBS_RDMA_CORE=N")),
            _ => assert_eq!(decided, Ok(Layout::of_release(release).unwrap())),
        }
    }
    // As of no release with these symbols.
    for (release, added) in [(43, 3), (50, 0), (64, 1)] {
        let mut evidence = probed(release);
        evidence.fallback.extra_qp_words = Some(added);
        assert!(decide(&evidence).unwrap_err().contains("ibv_qp_ex"));
    }
}

#[test]
fn package_or_user_names_the_release() {
    type Set = fn(&mut FallbackEvidence, u32);
    let by_package: Set = |evidence, release| evidence.package = Some(release);
    let by_user: Set = |evidence, release| evidence.user_release = Some(format!(" {release}"));
    for set in [by_package, by_user] {
        for release in 34..=65 {
            for claimed in 30..=70 {
                let mut evidence = probed(release);
                set(&mut evidence.fallback, claimed);
                let decided = decide(&evidence);
                if claimed == release {
                    assert_eq!(decided, Ok(Layout::of_release(release).unwrap()));
                }
                // A claim counts only where nothing contradicts it.
                if let Ok(layout) = decided {
                    assert_eq!(layout, Layout::of_release(claimed).unwrap());
                    assert_eq!(genuine(claimed, true).markers, evidence.markers);
                    assert_eq!(
                        Some(layout.extra_qp_words()),
                        evidence.fallback.extra_qp_words
                    );
                }
            }
        }
    }
    let mut evidence = probed(40);
    by_package(&mut evidence.fallback, 40);
    by_user(&mut evidence.fallback, 41);
    assert!(
        decide(&evidence)
            .unwrap_err()
            .contains("RINGVERBS_RDMA_CORE")
    );
    let mut evidence = probed(40);
    evidence.fallback.user_release = Some("forty".into());
    assert!(
        decide(&evidence)
            .unwrap_err()
            .contains("RINGVERBS_RDMA_CORE=forty")
    );
}

#[test]
fn user_names_the_release_of_a_vendor_s_library() {
    let mut evidence = probed(54);
    evidence.file = FileVersion::Malformed("14.2410mlnx54".to_owned());
    evidence.fallback.package = Some(2410);
    assert!(
        decide(&evidence)
            .unwrap_err()
            .contains("RINGVERBS_RDMA_CORE=N")
    );
    evidence.fallback.user_release = Some("54".into());
    assert_eq!(decide(&evidence), Ok(Layout::of_release(54).unwrap()));
    evidence.fallback.user_release = Some("44".into());
    assert!(decide(&evidence).is_err());
    // It does not count against what the file name says.
    let mut evidence = genuine(54, true);
    evidence.fallback.user_release = Some("44".into());
    assert_eq!(decide(&evidence), Ok(Layout::of_release(54).unwrap()));
}

#[test]
fn contradictions_are_refused() {
    // The file name says another release than the symbols.
    for release in 34..=65 {
        for claimed in 30..=70 {
            let mut evidence = genuine(release, true);
            let FileVersion::Known(minor, _) = evidence.file else {
                unreachable!()
            };
            evidence.file = FileVersion::Known(minor, claimed);
            if let Ok(layout) = decide(&evidence) {
                // Where symbols do not tell, the name is all there is; it must
                // at least be possible.
                assert!((layout.first..=layout.last).contains(&claimed));
                assert_eq!(
                    genuine(claimed, true).markers,
                    evidence.markers,
                    "{release} claimed to be {claimed}"
                );
            }
        }
    }
    // One function too many or too few.
    for release in [34, 36, 44, 50, 58, 61, 63, 64, 65] {
        for (i, marker) in MARKERS.iter().enumerate() {
            let mut evidence = genuine(release, true);
            evidence.markers[i] = !evidence.markers[i];
            assert!(decide(&evidence).is_err(), "{release}, {:?}", marker.name);
        }
    }
    // Loaded under the name of another private ABI.
    let mut evidence = genuine(60, true);
    evidence.name_suffix = Some(34);
    assert!(
        decide(&evidence)
            .unwrap_err()
            .contains("asked for a provider of private ABI 34")
    );
    // A minor number of the library that does not go with the release.
    let mut evidence = genuine(44, true);
    evidence.file = FileVersion::Known(15, 44);
    assert!(decide(&evidence).is_err());
}

#[test]
fn unknown_releases_are_refused() {
    let mut evidence = genuine(65, true);
    evidence.pabis = vec![66];
    evidence.name_suffix = Some(66);
    assert!(decide(&evidence).unwrap_err().contains("66"));
    let mut evidence = genuine(65, true);
    evidence.file = FileVersion::Known(18, 66);
    assert!(
        decide(&evidence).is_err(),
        "a later release with the same private ABI"
    );
    let mut evidence = genuine(34, true);
    evidence.pabis = vec![33];
    assert!(decide(&evidence).is_err());
    let mut evidence = genuine(34, true);
    evidence.pabis = vec![34, 57];
    assert!(decide(&evidence).is_err());
    let mut evidence = genuine(50, true);
    evidence.file = FileVersion::Malformed("14.2410mlnx54".to_owned());
    assert!(decide(&evidence).is_err());
}

#[test]
fn file_names() {
    assert_eq!(
        file_version(b"/usr/lib/libibverbs.so.1.14.44.0"),
        FileVersion::Known(14, 44)
    );
    assert_eq!(
        file_version(b"libibverbs.so.1.18.65.0"),
        FileVersion::Known(18, 65)
    );
    assert_eq!(file_version(b"/x/libibverbs.so.1"), FileVersion::Absent);
    assert_eq!(file_version(b"/x/libibverbs.so.1.14"), FileVersion::Absent);
    assert_eq!(file_version(b"/x/libverbs-private.so"), FileVersion::Absent);
    assert!(matches!(
        file_version(b"libibverbs.so.1.14.x"),
        FileVersion::Malformed(_)
    ));
    assert!(matches!(
        file_version(b"libibverbs.so.1.x.44"),
        FileVersion::Malformed(_)
    ));
    assert!(matches!(
        file_version(b"libibverbs.so.1.14.99999999999"),
        FileVersion::Malformed(_)
    ));
}

#[test]
fn own_names() {
    assert_eq!(
        name_suffix(b"/usr/lib/libibverbs/libringverbs-rdmav34.so"),
        Some(34)
    );
    assert_eq!(name_suffix(b"libringverbs-rdmav.so"), None);
    assert_eq!(name_suffix(b"libringverbs_provider.so"), None);
}
