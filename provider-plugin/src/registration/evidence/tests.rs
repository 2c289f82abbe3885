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
        own_suffix: Some(layout.pabi),
        unnamed: Unnamed::default(),
    }
}

/// The same of a library whose file name does not tell, as it is probed.
fn probed(release: u32) -> Evidence {
    let mut seen = genuine(release, false);
    seen.unnamed.qp_added = Some(Layout::of_release(release).unwrap().qp_added());
    seen
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
        let mut seen = probed(release);
        seen.unnamed.qp_added = Some(added);
        assert!(decide(&seen).unwrap_err().contains("ibv_qp_ex"));
    }
}

#[test]
fn package_or_user_names_the_release() {
    type Set = fn(&mut Unnamed, u32);
    let by_package: Set = |seen, release| seen.package = Some(release);
    let by_user: Set = |seen, release| seen.vouched = Some(format!(" {release}"));
    for set in [by_package, by_user] {
        for release in 34..=65 {
            for claimed in 30..=70 {
                let mut seen = probed(release);
                set(&mut seen.unnamed, claimed);
                let decided = decide(&seen);
                if claimed == release {
                    assert_eq!(decided, Ok(Layout::of_release(release).unwrap()));
                }
                // A claim counts only where nothing contradicts it.
                if let Ok(layout) = decided {
                    assert_eq!(layout, Layout::of_release(claimed).unwrap());
                    assert_eq!(genuine(claimed, true).markers, seen.markers);
                    assert_eq!(Some(layout.qp_added()), seen.unnamed.qp_added);
                }
            }
        }
    }
    let mut seen = probed(40);
    by_package(&mut seen.unnamed, 40);
    by_user(&mut seen.unnamed, 41);
    assert!(decide(&seen).unwrap_err().contains("RINGVERBS_RDMA_CORE"));
    let mut seen = probed(40);
    seen.unnamed.vouched = Some("forty".into());
    assert!(
        decide(&seen)
            .unwrap_err()
            .contains("RINGVERBS_RDMA_CORE=forty")
    );
}

#[test]
fn user_names_the_release_of_a_vendor_s_library() {
    let mut seen = probed(54);
    seen.file = FileVersion::Strange("14.2410mlnx54".to_owned());
    seen.unnamed.package = Some(2410);
    assert!(decide(&seen).unwrap_err().contains("RINGVERBS_RDMA_CORE=N"));
    seen.unnamed.vouched = Some("54".into());
    assert_eq!(decide(&seen), Ok(Layout::of_release(54).unwrap()));
    seen.unnamed.vouched = Some("44".into());
    assert!(decide(&seen).is_err());
    // It does not count against what the file name says.
    let mut seen = genuine(54, true);
    seen.unnamed.vouched = Some("44".into());
    assert_eq!(decide(&seen), Ok(Layout::of_release(54).unwrap()));
}

#[test]
fn contradictions_are_refused() {
    // The file name says another release than the symbols.
    for release in 34..=65 {
        for claimed in 30..=70 {
            let mut seen = genuine(release, true);
            let FileVersion::Known(minor, _) = seen.file else {
                unreachable!()
            };
            seen.file = FileVersion::Known(minor, claimed);
            if let Ok(layout) = decide(&seen) {
                // Where symbols do not tell, the name is all there is; it must
                // at least be possible.
                assert!((layout.first..=layout.last).contains(&claimed));
                assert_eq!(
                    genuine(claimed, true).markers,
                    seen.markers,
                    "{release} claimed to be {claimed}"
                );
            }
        }
    }
    // One function too many or too few.
    for release in [34, 36, 44, 50, 58, 61, 63, 64, 65] {
        for (i, marker) in MARKERS.iter().enumerate() {
            let mut seen = genuine(release, true);
            seen.markers[i] = !seen.markers[i];
            assert!(decide(&seen).is_err(), "{release}, {:?}", marker.name);
        }
    }
    // Loaded under the name of another private ABI.
    let mut seen = genuine(60, true);
    seen.own_suffix = Some(34);
    assert!(
        decide(&seen)
            .unwrap_err()
            .contains("asked for a provider of private ABI 34")
    );
    // A minor number of the library that does not go with the release.
    let mut seen = genuine(44, true);
    seen.file = FileVersion::Known(15, 44);
    assert!(decide(&seen).is_err());
}

#[test]
fn unknown_releases_are_refused() {
    let mut seen = genuine(65, true);
    seen.pabis = vec![66];
    seen.own_suffix = Some(66);
    assert!(decide(&seen).unwrap_err().contains("66"));
    let mut seen = genuine(65, true);
    seen.file = FileVersion::Known(18, 66);
    assert!(
        decide(&seen).is_err(),
        "a later release with the same private ABI"
    );
    let mut seen = genuine(34, true);
    seen.pabis = vec![33];
    assert!(decide(&seen).is_err());
    let mut seen = genuine(34, true);
    seen.pabis = vec![34, 57];
    assert!(decide(&seen).is_err());
    let mut seen = genuine(50, true);
    seen.file = FileVersion::Strange("14.2410mlnx54".to_owned());
    assert!(decide(&seen).is_err());
}

#[test]
fn file_names() {
    assert_eq!(
        file_version("/usr/lib/libibverbs.so.1.14.44.0"),
        FileVersion::Known(14, 44)
    );
    assert_eq!(
        file_version("libibverbs.so.1.18.65.0"),
        FileVersion::Known(18, 65)
    );
    assert_eq!(file_version("/x/libibverbs.so.1"), FileVersion::Absent);
    assert_eq!(file_version("/x/libibverbs.so.1.14"), FileVersion::Absent);
    assert_eq!(file_version("/x/libverbs-private.so"), FileVersion::Absent);
    assert!(matches!(
        file_version("libibverbs.so.1.14.x"),
        FileVersion::Strange(_)
    ));
    assert!(matches!(
        file_version("libibverbs.so.1.x.44"),
        FileVersion::Strange(_)
    ));
    assert!(matches!(
        file_version("libibverbs.so.1.14.99999999999"),
        FileVersion::Strange(_)
    ));
}

#[test]
fn own_names() {
    assert_eq!(
        own_suffix("/usr/lib/libibverbs/libringverbs-rdmav34.so"),
        Some(34)
    );
    assert_eq!(own_suffix("libringverbs-rdmav.so"), None);
    assert_eq!(own_suffix("libringverbs_provider.so"), None);
}
