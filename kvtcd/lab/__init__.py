"""The lab: run models over texts, calibrate profiles, measure what compression costs."""
