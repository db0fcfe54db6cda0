{{- define "gptserve.name" -}}
{{ contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "gptserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gptserve.labels" -}}
{{ include "gptserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "gptserve.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "gptserve.name" .) "" .Values.serviceAccount.create) }}
{{- end }}

{{- define "gptserve.letsEveryoneIn" -}}
{{ if or .Values.ingress.enabled (ne .Values.service.type "ClusterIP") }}yes{{ end }}
{{- end }}
