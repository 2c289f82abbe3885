//! Logarithmic axes.

/// The values at which an axis has labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ticks {
    /// Powers of two whose exponents are multiples of one number.
    PowersOfTwo,
    /// 1, 2, 5, 10, 20 and so on, or powers of ten.
    OneTwoFive,
}

/// A logarithmic axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    low: f64,
    high: f64,
    ticks: Ticks,
    max_labels: usize,
}

impl Axis {
    /// Returns an axis for values, with at most `max_labels` labels. Values without a
    /// logarithm are ignored.
    pub fn of(values: impl Iterator<Item = f64>, ticks: Ticks, max_labels: usize) -> Self {
        let values = values.filter(|value| value.is_finite() && *value > 0.0);
        let range = values.fold(None, |range: Option<(f64, f64)>, value| {
            let (low, high) = range.unwrap_or((value, value));
            Some((low.min(value), high.max(value)))
        });
        let (mut low, mut high) = range.unwrap_or((1.0, 1.0));
        // The axis spans a factor of four or more.
        let missing = 4.0 / (high / low);
        if missing > 1.0 {
            low /= missing.sqrt();
            high *= missing.sqrt();
        }
        let margin = (high / low).powf(0.05);
        Self {
            low: low / margin,
            high: high * margin,
            ticks,
            max_labels,
        }
    }

    /// Returns the position of a value on the axis, from 0 to 1.
    pub fn position(&self, value: f64) -> f64 {
        if !value.is_finite() || value <= 0.0 {
            return 0.0;
        }
        let position = (value / self.low).ln() / (self.high / self.low).ln();
        position.clamp(0.0, 1.0)
    }

    /// Returns the labelled values.
    pub fn ticks(&self) -> Vec<f64> {
        let within = |value: &f64| (self.low..=self.high).contains(value);
        let candidates = |step: usize| -> Vec<f64> {
            match self.ticks {
                Ticks::PowersOfTwo => (0..=60)
                    .step_by(step)
                    .map(|power| 2f64.powi(power))
                    .filter(within)
                    .collect(),
                Ticks::OneTwoFive if step == 1 => (0..=18)
                    .flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)))
                    .filter(within)
                    .collect(),
                Ticks::OneTwoFive => (0..=18)
                    .step_by(step - 1)
                    .map(|power| 10f64.powi(power))
                    .filter(within)
                    .collect(),
            }
        };
        let ticks = (1..=60)
            .map(candidates)
            .find(|ticks| ticks.len() <= self.max_labels);
        ticks.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_round_and_few() {
        let sizes = (0..31).map(|power| 2f64.powi(power));
        let axis = Axis::of(sizes, Ticks::PowersOfTwo, 7);
        let exponents: Vec<f64> = axis.ticks().iter().map(|tick| tick.log2()).collect();
        assert_eq!(exponents, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]);
        let axis = Axis::of([900.0, 12_000.0].into_iter(), Ticks::OneTwoFive, 8);
        assert_eq!(axis.ticks(), [1000.0, 2000.0, 5000.0, 10_000.0]);
        let axis = Axis::of([10.0, 1e8].into_iter(), Ticks::OneTwoFive, 8);
        assert!(axis.ticks().iter().all(|tick| tick.log10().fract() == 0.0));
        assert!(axis.ticks().len() > 3);
    }

    #[test]
    fn positions_are_ordered_and_within_the_axis() {
        let axis = Axis::of([8.0, 64.0].into_iter(), Ticks::PowersOfTwo, 7);
        assert!(
            0.0 < axis.position(8.0)
                && axis.position(8.0) < axis.position(9.0)
                && axis.position(64.0) < 1.0
        );
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(axis.position(odd), 0.0);
        }
        let empty = Axis::of([].into_iter(), Ticks::PowersOfTwo, 7);
        assert!(empty.position(1.0).is_finite());
        let one = Axis::of([4096.0].into_iter(), Ticks::PowersOfTwo, 7);
        assert!((one.position(4096.0) - 0.5).abs() < 1e-9);
        assert_eq!(one.ticks(), [2048.0, 4096.0, 8192.0]);
    }
}
